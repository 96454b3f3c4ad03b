// The live picture: one stream of server-sent events, applied to tables that components subscribe to.
import { useEffect, useState } from "preact/hooks";

import { ApiError, request } from "./api";
import type { Alert, Endpoint, Hello, Job, NodeRow, Status, Team } from "./types";

export type Link = "connecting" | "live" | "lost";

export interface Live {
  link: Link;
  hello: Hello | null;
  status: Status | null;
  jobs: Map<string, Job>;
  nodes: Map<string, NodeRow>;
  endpoints: Map<string, Endpoint>;
  teams: Map<string, Team>;
  alerts: Map<string, Alert> | null;
  /** Seconds by which the cluster's clock is ahead of this one's. */
  ahead_s: number;
  /** The build of the page that this tab runs, and whether the cluster serves another by now. */
  stale: boolean;
}

const SILENCE_MS = 30_000;
const LONGEST_WAIT_MS = 15_000;
const empty = (): Live => ({
  link: "connecting",
  hello: null,
  status: null,
  jobs: new Map(),
  nodes: new Map(),
  endpoints: new Map(),
  teams: new Map(),
  alerts: null,
  ahead_s: 0,
  stale: false,
});

export let live: Live = empty();
let build = "";
const listeners = new Set<() => void>();

function publish(change: Partial<Live>) {
  live = { ...live, ...change };
  for (const listener of listeners) listener();
}

/** Renders the component again whenever the picture changes, at most once in a frame. */
export function useLive(): Live {
  const [, render] = useState(0);
  useEffect(() => {
    let frame = 0;
    const listener = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        render((n) => n + 1);
      });
    };
    listeners.add(listener);
    listener();
    return () => {
      listeners.delete(listener);
      cancelAnimationFrame(frame);
    };
  }, []);
  return live;
}

/** The time on the cluster's clock. */
export const now = () => Date.now() / 1000 + live.ahead_s;

interface Change {
  all?: boolean;
  rows: Record<string, object>;
  gone?: string[];
}

function apply<T>(table: Map<string, T> | null, change: Change): Map<string, T> {
  const next = new Map(change.all ? [] : table);
  for (const id of change.gone ?? []) next.delete(id);
  for (const [id, fields] of Object.entries(change.rows)) next.set(id, { ...next.get(id), ...fields } as T);
  return next;
}

function receive(kind: string, data: string) {
  const body = JSON.parse(data);
  switch (kind) {
    case "hello": {
      build ||= body.page;
      publish({ link: "live", hello: body, ahead_s: body.at_s - Date.now() / 1000, stale: body.page !== build });
      break;
    }
    case "status":
      publish({ status: body });
      break;
    case "jobs":
      publish({ jobs: apply(live.jobs, body) });
      break;
    case "nodes":
      publish({ nodes: apply(live.nodes, body) });
      break;
    case "endpoints":
      publish({ endpoints: apply(live.endpoints, body) });
      break;
    case "teams":
      publish({ teams: apply(live.teams, body) });
      break;
    case "alerts":
      publish({ alerts: apply(live.alerts, body) });
  }
}

async function listen(signal: AbortSignal): Promise<void> {
  const stop = new AbortController();
  const end = () => stop.abort();
  signal.addEventListener("abort", end);
  let silence = setTimeout(end, SILENCE_MS);
  try {
    const response = await request("/v1/stream", stop.signal);
    const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(silence);
      silence = setTimeout(end, SILENCE_MS);
      buffer += value;
      const messages = buffer.split("\n\n");
      buffer = messages.pop()!;
      for (const message of messages) {
        const found = /^event: (\w+)\ndata: (.*)$/s.exec(message);
        if (found) receive(found[1], found[2]);
      }
    }
  } finally {
    clearTimeout(silence);
    signal.removeEventListener("abort", end);
  }
}

/** Listens until `signal` ends it, and comes back after an interruption, later each time. */
export async function stream(signal: AbortSignal): Promise<void> {
  live = empty();
  for (let tries = 0; !signal.aborted; tries++) {
    const begun = Date.now();
    try {
      await listen(signal);
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return;
    }
    if (signal.aborted) return;
    publish({ link: "lost" });
    if (Date.now() - begun > 10_000) tries = 0;
    const wait = Math.min(LONGEST_WAIT_MS, 500 * 2 ** tries) * (0.5 + Math.random() / 2);
    await new Promise((resolve) => {
      setTimeout(resolve, wait);
      signal.addEventListener("abort", resolve, { once: true });
    });
  }
}
