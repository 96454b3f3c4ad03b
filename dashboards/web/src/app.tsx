// The frame around every page: where one is, who one is, and whether what is shown is live.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { onSignOut, token } from "./api";
import { redrawAll } from "./chart";
import { record } from "./history";
import { Icon } from "./icons";
import { stream, useLive, type Live } from "./live";
import { Login } from "./login";
import { Help, Palette } from "./palette";
import { Alerts } from "./pages/alerts";
import { Capacity } from "./pages/capacity";
import { Cost } from "./pages/cost";
import { Endpoints } from "./pages/endpoints";
import { Models } from "./pages/models";
import { Now } from "./pages/now";
import { Queue } from "./pages/queue";
import { Runs } from "./pages/runs";
import { PAGES, usePlace, type Place } from "./routes";
import { Toast } from "./toast";

const VIEWS: Record<string, (props: { at: Place }) => JSX.Element> = {
  now: Now,
  capacity: Capacity,
  queue: Queue,
  runs: Runs,
  endpoints: Endpoints,
  cost: Cost,
  models: Models,
  alerts: Alerts,
};

function toggleTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("raytide.theme", root.dataset.theme);
  redrawAll();
}

export function App() {
  const [isIn, setIn] = useState(token.get() !== "");
  const [why, setWhy] = useState("");
  useEffect(() => {
    onSignOut(() => {
      if (!token.get()) return;
      token.clear();
      setWhy("The token is not valid any more.");
      setIn(false);
    });
  }, []);
  const leave = () => {
    token.clear();
    setWhy("");
    setIn(false);
  };
  return (
    <>
      {isIn ? <Frame leave={leave} /> : <Login onDone={() => setIn(true)} why={why} />}
      <Toast />
    </>
  );
}

function Frame({ leave }: { leave: () => void }) {
  const at = usePlace();
  const now = useLive();
  const [open, setOpen] = useState<"" | "help" | "find">("");
  const content = useRef<HTMLElement>(null);
  const pages = useRef<HTMLElement>(null);
  const page = PAGES.find((each) => each.id === at.page) ?? PAGES[0];
  const View = VIEWS[page.id];

  useEffect(() => {
    const stop = new AbortController();
    void stream(stop.signal);
    const forget = record();
    return () => {
      stop.abort();
      forget();
    };
  }, []);
  useEffect(() => {
    document.title = `${at.rest || page.title} · ${now.status?.name ?? "raytide"}`;
  }, [at.rest, page.title, now.status?.name]);
  useEffect(() => scrollTo(0, 0), [at.page, at.rest]);
  useEffect(() => {
    const link = pages.current?.querySelector<HTMLElement>("[aria-current]");
    if (link) pages.current!.scrollLeft = link.offsetLeft - (pages.current!.clientWidth - link.offsetWidth) / 2;
  }, [page.id]);
  useEffect(() => {
    let prefix = 0;
    const react = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey) {
        if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
          event.preventDefault();
          setOpen("find");
        }
        return;
      }
      if ((event.target as HTMLElement).matches("input, select, textarea")) return;
      const wanted = PAGES.find((each) => each.key === event.key);
      if (Date.now() - prefix < 1200 && wanted) {
        prefix = 0;
        location.hash = `#/${wanted.id}`;
        content.current?.focus();
      } else if (event.key === "g") prefix = Date.now();
      else if (event.key === "?") setOpen("help");
      else if (event.key === "t") toggleTheme();
      else if (event.key === "/") {
        event.preventDefault();
        setOpen("find");
      }
    };
    addEventListener("keydown", react);
    return () => removeEventListener("keydown", react);
  }, []);

  const toContent = (event: Event) => {
    event.preventDefault();
    content.current?.focus();
  };
  return (
    <div class="frame">
      <a class="skip" href="#content" onClick={toContent}>
        Skip to the content
      </a>
      <div class="side">
        <a class="brand" href="#/now">
          <img src="/page/icon.svg" alt="" />
          {now.status?.name ?? "raytide"}
        </a>
        <nav aria-label="Pages" ref={pages}>
          {PAGES.map((each) => (
            <a key={each.id} href={`#/${each.id}`} aria-current={each.id === page.id ? "page" : undefined}>
              <Icon name={each.id} />
              {each.title}
              <Count page={each.id} now={now} />
            </a>
          ))}
        </nav>
        <div class="foot">
          <Who now={now} />
          <div class="tools">
            <button type="button" class="icon-button" onClick={() => setOpen("find")} aria-label="Find" title="Find (/)">
              <Icon name="search" />
            </button>
            <button type="button" class="icon-button" onClick={toggleTheme} aria-label="Switch between dark and light" title="Dark or light (t)">
              <Icon name="moon" />
            </button>
            <button type="button" class="icon-button" onClick={() => setOpen("help")} aria-label="Keyboard shortcuts" title="Keyboard (?)">
              <Icon name="help" />
            </button>
            <button type="button" class="icon-button" onClick={leave} aria-label="Sign out" title="Sign out">
              <Icon name="out" />
            </button>
          </div>
        </div>
      </div>
      <main id="content" tabIndex={-1} ref={content}>
        {now.link === "lost" && (
          <div class="notice bad" role="status">
            <b>The connection to the cluster is lost.</b> What is shown is as it was; it is tried again.
          </div>
        )}
        {now.stale && (
          <div class="notice" role="status">
            The cluster serves a newer page.{" "}
            <button type="button" class="button plain" onClick={() => location.reload()}>
              Load it
            </button>
          </div>
        )}
        <View at={at} />
      </main>
      {open === "help" && <Help onClose={() => setOpen("")} />}
      {open === "find" && <Palette onClose={() => setOpen("")} />}
    </div>
  );
}

function Who({ now }: { now: Live }) {
  const hello = now.hello;
  if (!hello) return <div class="who">Connecting…</div>;
  return (
    <div class="who" title={hello.team === "*" ? "" : "Jobs, endpoints and costs of other teams are not shown."}>
      <b>{hello.user}</b>
      <br />
      {hello.team === "*" ? "sees every team" : `sees team ${hello.team} only`}
    </div>
  );
}

function Count({ page, now }: { page: string; now: Live }) {
  if (!now.status) return null;
  if (page === "alerts") {
    const firing = [...(now.alerts?.values() ?? [])].filter((alert) => alert.state === "firing").length;
    return firing ? <span class="count bad">{firing}</span> : null;
  }
  const count = { queue: [...now.jobs.values()].filter((job) => job.state === "queued").length, endpoints: now.endpoints.size, capacity: now.nodes.size }[page];
  return count ? <span class="count">{count}</span> : null;
}
