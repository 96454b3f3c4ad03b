// The small parts that every page is made of.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { ago, moment } from "./format";
import { announce } from "./toast";

/** `$_`: shows and copies the command that prints the same number. */
export function Cmd({ run }: { run: string }) {
  const copy = async (event: Event) => {
    event.stopPropagation();
    event.preventDefault();
    try {
      await navigator.clipboard.writeText(run);
      announce(run, "copied");
    } catch {
      announce(run, "run this");
    }
  };
  return (
    <button type="button" class="cmd" onClick={copy} title={run} aria-label={`Copy the command: ${run}`}>
      $_
    </button>
  );
}

export function Card(props: {
  title: string;
  cmd?: string;
  aside?: ComponentChildren;
  flush?: boolean;
  class?: string;
  children: ComponentChildren;
}) {
  return (
    <section class={`card ${props.flush ? "flush" : ""} ${props.class ?? ""}`} aria-label={props.title}>
      <header>
        <h2>{props.title}</h2>
        {props.cmd && <Cmd run={props.cmd} />}
        <div class="aside">{props.aside}</div>
      </header>
      <div class="body">{props.children}</div>
    </section>
  );
}

export function Stat(props: {
  label: string;
  value: ComponentChildren;
  unit?: string;
  note?: ComponentChildren;
  /** All of the note, where it has only the most important part. */
  noteTitle?: string;
  tone?: Tone;
  cmd?: string;
  href?: string;
  share?: number | null;
}) {
  return (
    <div class="stat">
      <div class="label">
        {props.href ? <a href={props.href}>{props.label}</a> : props.label}
        {props.cmd && <Cmd run={props.cmd} />}
      </div>
      <div class={`value ${props.tone ?? ""}`}>
        {props.value}
        {props.unit && <span class="unit"> {props.unit}</span>}
      </div>
      {props.share != null ? <Meter share={props.share} tone={props.tone} label={`${props.label}: ${Math.round(props.share * 100)} %`} /> : <div class="no-meter" />}
      <div class="note" title={props.noteTitle ?? (typeof props.note === "string" ? props.note : undefined)}>
        {props.note ?? " "}
      </div>
    </div>
  );
}

export type Tone = "good" | "warn" | "bad" | "info" | "quiet";

export function Meter({ share, tone, label }: { share: number | null; tone?: Tone; label?: string }) {
  const bounded = Math.max(0, Math.min(1, share ?? 0));
  return (
    <div class={`meter ${tone ?? ""}`} role="img" aria-label={label ?? `${Math.round(bounded * 100)} %`}>
      <span style={{ width: `${bounded * 100}%` }} />
    </div>
  );
}

const TONES: Record<string, Tone> = {
  running: "good",
  ready: "good",
  succeeded: "good",
  promoted: "good",
  active: "good",
  queued: "quiet",
  stopped: "quiet",
  deleted: "quiet",
  admitted: "info",
  launching: "info",
  requested: "info",
  deploying: "info",
  starting: "info",
  stopping: "warn",
  draining: "warn",
  terminating: "warn",
  deleting: "warn",
  pending: "warn",
  rolled_back: "warn",
  warning: "warn",
  failed: "bad",
  firing: "bad",
  critical: "bad",
  page: "bad",
};

export function State({ of, title }: { of: string; title?: string }) {
  return (
    <span class={`state ${TONES[of] ?? "quiet"}`} title={title}>
      {of.replace("_", " ")}
    </span>
  );
}

export function When({ at }: { at: number | null | undefined }) {
  return (
    <time title={moment(at)} dateTime={at ? new Date(at * 1000).toISOString() : undefined}>
      {ago(at)}
    </time>
  );
}

export function Empty({ title, children, cmd }: { title: string; children?: ComponentChildren; cmd?: string }) {
  return (
    <div class="empty">
      <strong>{title}</strong>
      {children && <p>{children}</p>}
      {cmd && (
        <p class="command">
          <code>{cmd}</code>
          <Cmd run={cmd} />
        </p>
      )}
    </div>
  );
}

export function Skeleton({ height = 120 }: { height?: number }) {
  return <div class="skeleton" style={{ height: `${height}px` }} aria-hidden="true" />;
}

export function Problem({ error }: { error: Error & { hint?: string } }) {
  return (
    <div class="empty bad" role="alert">
      <strong>{error.message}</strong>
      {error.hint && <p>{error.hint}</p>}
    </div>
  );
}

export function Choice<T extends string>(props: {
  label: string;
  options: readonly (readonly [T, string])[];
  value: T;
  onChange: (value: T) => void;
}) {
  return (
    <div class="choice" role="group" aria-label={props.label}>
      {props.options.map(([value, text]) => (
        <button
          type="button"
          key={value}
          aria-pressed={props.value === value}
          class={props.value === value ? "on" : ""}
          onClick={() => props.onChange(value)}
        >
          {text}
        </button>
      ))}
    </div>
  );
}

export function Pairs({ rows }: { rows: [string, ComponentChildren][] }) {
  return (
    <dl class="pairs">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

interface Loaded<T> {
  data: T | null;
  error: (Error & { status?: number; hint?: string }) | null;
}

/** Loads when `keys` or `version` change and every `every_ms`. It keeps what it has while it loads again, unless `keys` have changed. */
export function useLoad<T>(load: (signal: AbortSignal) => Promise<T>, keys: unknown[], every_ms = 0, version: unknown = 0): Loaded<T> {
  const [state, setState] = useState<Loaded<T>>({ data: null, error: null });
  const shown = useRef(keys);
  useEffect(() => {
    const stop = new AbortController();
    let timer = 0;
    if (keys.some((key, index) => key !== shown.current[index])) setState({ data: null, error: null });
    shown.current = keys;
    const run = async () => {
      try {
        const data = await load(stop.signal);
        if (!stop.signal.aborted) setState({ data, error: null });
      } catch (error) {
        if (!stop.signal.aborted) setState((before) => ({ data: before.data, error: error as Error }));
      }
      if (every_ms && !stop.signal.aborted) timer = setTimeout(run, document.hidden ? every_ms * 4 : every_ms);
    };
    void run();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [...keys, version]);
  return state;
}
