// Builds the page into ./static: one script and one style sheet with hashed names, and the licences of what is in them.
// `node build.mjs DIRECTORY` builds elsewhere, for the test that compares.
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import * as esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "static");
const VENDORED = ["preact", "uplot"];

const hashed = (name, extension, content) =>
  `${name}-${createHash("sha256").update(content).digest("hex").slice(0, 10)}.${extension}`;

async function bundle(entry) {
  const built = await esbuild.build({
    absWorkingDir: here,
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    outdir: "out",
    format: entry.endsWith("theme.ts") ? "iife" : "esm",
    target: ["chrome110", "firefox115", "safari16.4"],
    jsx: "automatic",
    jsxImportSource: "preact",
    legalComments: "none",
    charset: "utf8",
  });
  return Object.fromEntries(built.outputFiles.map((file) => [file.path.split(".").at(-1), file.text]));
}

rmSync(out, { recursive: true, force: true });
mkdirSync(join(out, "licences"), { recursive: true });
const app = await bundle("src/main.tsx");
const theme = await bundle("src/theme.ts");
const names = {
  APP: hashed("app", "js", app.js),
  STYLE: hashed("app", "css", app.css),
  THEME: hashed("theme", "js", theme.js),
};
writeFileSync(join(out, names.APP), app.js);
writeFileSync(join(out, names.STYLE), app.css);
writeFileSync(join(out, names.THEME), theme.js);
const html = readFileSync(join(here, "src/index.html"), "utf8");
writeFileSync(join(out, "index.html"), html.replace(/%(\w+)%/g, (_, name) => `/page/${names[name]}`));
cpSync(join(here, "src/icon.svg"), join(out, "icon.svg"));
for (const name of VENDORED) {
  const { version, license } = JSON.parse(readFileSync(join(here, "node_modules", name, "package.json"), "utf8"));
  const text = readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8");
  writeFileSync(join(out, "licences", `${name}.txt`), `${name} ${version}\nSPDX-License-Identifier: ${license}\n\n${text}`);
}
