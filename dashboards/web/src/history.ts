// Curves of the last hours: the monitor's store where it runs, else what this page has seen since it was opened.
import { ApiError, get } from "./api";
import { live } from "./live";
import type { Endpoint } from "./types";

export interface Curve {
  labels: Record<string, string>;
  points: [number, number][];
}

let isMissing = false;

/** Returns the stored series; null where this cluster keeps no history. */
export async function stored(
  metric: string,
  options: { since_s: number; step_s: number; rate?: boolean; quantile?: number; [label: string]: string | number | boolean | undefined },
  signal?: AbortSignal,
): Promise<Curve[] | null> {
  if (isMissing) return null;
  const { rate, quantile, ...rest } = options;
  const query: Record<string, string | number> = { metric };
  for (const [name, value] of Object.entries(rest)) if (value !== undefined) query[name] = value as string | number;
  if (rate) query.rate = 1;
  if (quantile) query.quantile = quantile;
  try {
    return (await get<{ series: Curve[] }>("/v1/history", query, signal)).series;
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) {
      isMissing = true;
      return null;
    }
    if (error instanceof ApiError && error.status < 500) return null;
    throw error;
  }
}

const MOST = 450;
type Field = "tps" | "rps" | "ttft_s" | "kv_use" | "ongoing" | "ready" | "target";
const FIELDS: Field[] = ["tps", "rps", "ttft_s", "kv_use", "ongoing", "ready", "target"];

export interface Seen {
  at: number[];
  values: Record<Field, (number | null)[]>;
}

const seen = new Map<string, Seen>();

function note(endpoint: Endpoint, at: number) {
  let kept = seen.get(endpoint.id);
  if (!kept) {
    kept = { at: [], values: Object.fromEntries(FIELDS.map((field) => [field, []])) as unknown as Seen["values"] };
    seen.set(endpoint.id, kept);
  }
  kept.at.push(at);
  for (const field of FIELDS) kept.values[field].push(endpoint[field]);
  if (kept.at.length > MOST) {
    kept.at.shift();
    for (const field of FIELDS) kept.values[field].shift();
  }
}

/** Notes the present values of every endpoint, every other second while the page is open: a quarter of an hour of them. */
export function record(): () => void {
  const timer = setInterval(() => {
    if (live.link !== "live") return;
    const at = Date.now() / 1000 + live.ahead_s;
    for (const endpoint of live.endpoints.values()) note(endpoint, at);
    for (const name of seen.keys()) if (!live.endpoints.has(name)) seen.delete(name);
  }, 2000);
  return () => {
    clearInterval(timer);
    seen.clear();
  };
}

export const seenOf = (endpoint: string): Seen | undefined => seen.get(endpoint);
