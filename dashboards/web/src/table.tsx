// A table of any length: only the rows in view exist. Arrow keys move, Enter opens, headers sort, long ones have a filter.
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { num } from "./format";
import { Empty } from "./ui";

export interface Column<T> {
  key: string;
  title: string;
  width: string;
  end?: boolean;
  /** Shown at this width of the screen and above; always by default. */
  from?: "medium" | "wide";
  sort?: (row: T) => number | string | null;
  cell: (row: T) => ComponentChildren;
}

const ROW = 44;
const AHEAD = 8;
/** Up to this many rows are found by eye. */
const FEW = 15;

/** The rows whose text has every word that was typed, and the field for typing; null while the rows are few. */
export function useFilter<T>(label: string, rows: T[], search?: (row: T) => string): { rows: T[]; field: ComponentChildren; typed: string } {
  const [typed, setTyped] = useState("");
  const found = useMemo(() => {
    const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
    return search && words.length ? rows.filter((row) => { const text = search(row).toLowerCase(); return words.every((word) => text.includes(word)); }) : rows;
  }, [rows, typed]);
  const field = search && (rows.length > FEW || typed) && (
    <div class="filter">
      <input class="field" type="search" placeholder="Filter" aria-label={`Filter ${label.toLowerCase()}`} value={typed} onInput={(event) => setTyped(event.currentTarget.value)} />
      <span role="status" class="faint">{typed && `${num(found.length)} of ${num(rows.length)}`}</span>
    </div>
  );
  return { rows: found, field: field || null, typed };
}

export function Table<T>(props: {
  label: string;
  columns: Column<T>[];
  rows: T[];
  id: (row: T) => string;
  href?: (row: T) => string;
  height?: number;
  sorted?: [string, 1 | -1];
  /** The text of a row in which the filter looks; without it, there is no filter. */
  search?: (row: T) => string;
}) {
  const { columns } = props;
  const { rows, field, typed } = useFilter(props.label, props.rows, props.search);
  const [order, setOrder] = useState<[string, 1 | -1] | null>(props.sorted ?? null);
  const [top, setTop] = useState(0);
  const [at, setAt] = useState(0);
  const box = useRef<HTMLDivElement>(null);
  const [height, setHeight] = useState(props.height ?? 480);
  const wanted = useRef(false);

  const sorted = useMemo(() => {
    const by = order && columns.find((column) => column.key === order[0])?.sort;
    if (!order || !by) return rows;
    const keyed = rows.map((row) => [by(row), row] as const);
    keyed.sort(([a], [b]) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -order[1] : order[1]));
    return keyed.map(([, row]) => row);
  }, [rows, order, columns]);

  const first = Math.max(0, Math.floor(top / ROW) - AHEAD);
  const last = Math.min(sorted.length, Math.ceil((top + height) / ROW) + AHEAD);
  const template = { "--all": columns.map((c) => c.width).join(" "), "--medium": widths(columns, "medium"), "--narrow": widths(columns) };

  useLayoutEffect(() => {
    const view = box.current!;
    const watch = new ResizeObserver(() => setHeight(view.clientHeight));
    watch.observe(view);
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (!wanted.current) return;
    const row = box.current!.querySelector<HTMLElement>(`[aria-rowindex="${at + 2}"]`);
    if (!row) return; // it exists once the view has scrolled there
    wanted.current = false;
    row.focus({ preventScroll: true });
  }, [at, first]);

  useLayoutEffect(() => {
    box.current!.scrollTop = 0;
    setAt(0);
  }, [typed]);

  const move = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Enter" && props.href && sorted[at] && (event.target as HTMLElement).role === "row") {
      location.hash = props.href(sorted[at]);
    }
    if (!step || !(event.target as HTMLElement).closest("[role=row]")) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(sorted.length - 1, at + step));
    const view = box.current!;
    if (next * ROW < view.scrollTop) view.scrollTop = next * ROW;
    else if ((next + 1) * ROW > view.scrollTop + view.clientHeight - ROW) view.scrollTop = (next + 2) * ROW - view.clientHeight;
    wanted.current = true;
    setAt(next);
  };
  const sortBy = (key: string) => setOrder((now) => (now?.[0] === key ? (now[1] === -1 ? [key, 1] : null) : [key, -1]));

  return (
    <div class="table" style={template}>
      {field}
      <div
        class="view"
        role="table"
        aria-label={props.label}
        aria-rowcount={sorted.length + 1}
        ref={box}
        style={{ maxHeight: `${props.height ?? 480}px` }}
        onScroll={(event) => setTop(event.currentTarget.scrollTop)}
        onKeyDown={move}
      >
        <div role="row" class="head" aria-rowindex={1}>
          {columns.map((column) => (
            <div
              key={column.key}
              role="columnheader"
              class={cls(column)}
              aria-sort={order?.[0] === column.key ? (order[1] === 1 ? "ascending" : "descending") : undefined}
            >
              {column.sort ? (
                <button type="button" onClick={() => sortBy(column.key)}>
                  {column.title}
                  <span class="arrow" aria-hidden="true">
                    {order?.[0] === column.key ? (order[1] === 1 ? "↑" : "↓") : ""}
                  </span>
                </button>
              ) : (
                column.title
              )}
            </div>
          ))}
        </div>
        <div role="rowgroup" style={{ height: `${sorted.length * ROW}px`, position: "relative" }}>
          {sorted.slice(first, last).map((row, index) => {
            const place = first + index;
            const href = props.href?.(row);
            return (
              <div
                key={props.id(row)}
                role="row"
                aria-rowindex={place + 2}
                tabIndex={place === Math.min(at, sorted.length - 1) ? 0 : -1}
                class={`row ${href ? "opens" : ""}`}
                style={{ transform: `translateY(${place * ROW}px)` }}
                onFocus={() => setAt(place)}
                onClick={(event) => {
                  if (href && !(event.target as HTMLElement).closest("a,button")) location.hash = href;
                }}
              >
                {columns.map((column) => (
                  <div key={column.key} role="cell" class={cls(column)}>
                    {column.cell(row)}
                  </div>
                ))}
              </div>
            );
          })}
        </div>
        {typed && sorted.length === 0 && <Empty title={`Nothing matches “${typed}”`} />}
      </div>
    </div>
  );
}

const cls = <T,>(column: Column<T>) => `${column.end ? "end" : ""} ${column.from ? `from-${column.from}` : ""}`;
const widths = <T,>(columns: Column<T>[], upTo?: "medium") =>
  columns
    .filter((c) => !c.from || c.from === upTo)
    .map((c) => c.width)
    .join(" ");
