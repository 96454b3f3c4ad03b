// Shortcuts, their help, and the palette that finds pages, jobs, endpoints and nodes by name.
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { type Live, useLive } from "./live";
import { PAGES } from "./routes";

function Dialog(props: { label: string; onClose: () => void; children: ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    // Before the next key, which belongs to the dialog.
    const before = document.activeElement as HTMLElement | null;
    const dialog = box.current!;
    (dialog.querySelector<HTMLElement>("input, button") ?? dialog).focus();
    const keep = (event: KeyboardEvent) => {
      if (event.key === "Escape") props.onClose();
      if (event.key !== "Tab") return;
      const inside = [...dialog.querySelectorAll<HTMLElement>("input, button, a[href]")];
      if (inside.length < 2) event.preventDefault();
      else if (event.shiftKey && document.activeElement === inside[0]) {
        event.preventDefault();
        inside.at(-1)!.focus();
      } else if (!event.shiftKey && document.activeElement === inside.at(-1)) {
        event.preventDefault();
        inside[0].focus();
      }
    };
    dialog.addEventListener("keydown", keep);
    return () => {
      dialog.removeEventListener("keydown", keep);
      before?.focus();
    };
  }, []);
  return (
    <div class="veil" onMouseDown={(event) => event.target === event.currentTarget && props.onClose()}>
      <div class="dialog" role="dialog" aria-modal="true" aria-label={props.label} tabIndex={-1} ref={box}>
        {props.children}
      </div>
    </div>
  );
}

export function Help({ onClose }: { onClose: () => void }) {
  const keys: [string[], string][] = [
    ...PAGES.map((page) => [["g", page.key], page.title] as [string[], string]),
    [["/"], "Find a job, an endpoint, a node or a page"],
    [["↑", "↓"], "Move in a table; Enter opens"],
    [["t"], "Switch between dark and light"],
    [["?"], "This help"],
    [["Esc"], "Close"],
  ];
  return (
    <Dialog label="Keyboard shortcuts" onClose={onClose}>
      <h2>Keyboard</h2>
      <div class="keys">
        {keys.map(([parts, text]) => (
          <>
            <span>
              {parts.map((part) => (
                <>
                  <kbd>{part}</kbd>{" "}
                </>
              ))}
            </span>
            <span>{text}</span>
          </>
        ))}
      </div>
    </Dialog>
  );
}

interface Found {
  href: string;
  name: string;
  text: string;
  kind: string;
}

function findable(live: Live): Found[] {
  return [
    ...PAGES.map((page) => ({ href: `#/${page.id}`, name: page.title, text: "", kind: "page" })),
    ...[...live.endpoints.values()].map((e) => ({ href: `#/endpoints/${e.id}`, name: e.id, text: e.model, kind: "endpoint" })),
    ...[...live.jobs.values()].map((j) => ({ href: `#/runs/${j.id}`, name: j.id, text: `${j.name} · ${j.state}`, kind: j.kind })),
    ...[...live.nodes.values()].map((n) => ({ href: `#/capacity/${n.id}`, name: n.id, text: `${n.type} in ${n.zone}`, kind: "node" })),
  ];
}

const MOST_SHOWN = 12;

export function Palette({ onClose }: { onClose: () => void }) {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const live = useLive();
  const all = useMemo(() => findable(live), [live]);
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = all.filter((each) => words.every((word) => `${each.name} ${each.text} ${each.kind}`.toLowerCase().includes(word))).slice(0, MOST_SHOWN);
  const chosen = Math.min(at, found.length - 1);
  const open = (href: string) => {
    onClose();
    location.hash = href;
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      setAt((chosen + step + found.length) % Math.max(1, found.length));
    } else if (event.key === "Enter" && found[chosen]) open(found[chosen].href);
  };
  return (
    <Dialog label="Find" onClose={onClose}>
      <input
        placeholder="Find a job, an endpoint, a node, a page"
        aria-label="Find"
        role="combobox"
        aria-expanded="true"
        aria-controls="found"
        aria-activedescendant={found[chosen] ? `found-${chosen}` : undefined}
        value={text}
        onInput={(event) => {
          setText(event.currentTarget.value);
          setAt(0);
        }}
        onKeyDown={onKeyDown}
      />
      <div role="listbox" id="found" aria-label="Found">
        {found.map((each, index) => (
          <div
            key={each.href}
            id={`found-${index}`}
            role="option"
            aria-selected={index === chosen}
            onMouseEnter={() => setAt(index)}
            onMouseDown={(event) => {
              event.preventDefault();
              open(each.href);
            }}
          >
            <span class="strong">{each.name}</span>
            <span class="quiet clip">{each.text}</span>
            <span class="kind">{each.kind}</span>
          </div>
        ))}
      </div>
      {found.length === 0 && <p class="empty">Nothing is called that.</p>}
    </Dialog>
  );
}
