// Numbers with their units, and times: relative where they are read, absolute in titles.
import { now } from "./live";

export const MICRO = 1e6;

export function usd(micro: number | null | undefined): string {
  if (micro == null) return "–";
  const amount = micro / MICRO;
  const digits = Math.abs(amount) >= 1000 ? 0 : Math.abs(amount) >= 1 || amount === 0 ? 2 : Math.abs(amount) >= 0.01 ? 3 : 4;
  return `${amount < 0 ? "−" : ""}$${Math.abs(amount).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })}`;
}

const PREFIXES: [number, string][] = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

/** Three significant digits, with a prefix from 10,000 on: 1.25, 980, 12.4k. */
export function num(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size < 10_000) return trim(size >= 100 || Number.isInteger(value) ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2));
  const [unit, prefix] = PREFIXES.find(([least]) => size >= 0.9995 * least)!;
  return `${trim(threeDigits(value / unit))}${prefix}`;
}

/** Not `toPrecision`, which writes 1000 as 1.00e+3. */
const threeDigits = (value: number) => value.toFixed(Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2);

const trim = (text: string) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

export const percent = (share: number | null | undefined, digits = 0) =>
  share == null ? "–" : `${(share * 100).toFixed(digits)} %`;

/** A duration: 240 ms, 3.2 s, 12 min, 3 h 20 min, 5 d. */
export function span(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (size < 10) return `${trim(seconds.toFixed(1))} s`;
  if (size < 90) return `${Math.round(seconds)} s`;
  if (size < 5400) return `${Math.round(seconds / 60)} min`;
  if (size < 10 * 3600) {
    const minutes = Math.round(size / 60);
    return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
  }
  if (size < 36 * 3600) return `${Math.round(size / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export const ago = (at_s: number | null | undefined) => (at_s == null ? "–" : sinceText(now() - at_s));
const sinceText = (seconds: number) => (seconds < 5 ? "just now" : `${span(Math.max(0, Math.round(seconds)))} ago`);

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const full = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
export const time = (at_s: number) => clock.format(at_s * 1000);
export const date = (at_s: number) => day.format(at_s * 1000);
/** The time of day, after the date where that is not today. */
export const when = (at_s: number) => (date(at_s) === date(now()) ? time(at_s) : `${date(at_s)}, ${time(at_s)}`);
export const moment = (at_s: number | null | undefined) => (at_s == null ? "" : full.format(at_s * 1000));

export const plural = (count: number, noun: string) => `${num(count)} ${noun}${count === 1 ? "" : "s"}`;
