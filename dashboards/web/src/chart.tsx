// Curves over time or steps by uPlot, in the page's colours, with the values under the pointer.
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { date, num, span, when } from "./format";

export interface Series {
  label: string;
  color: string;
  values: (number | null)[];
  dash?: boolean;
}

export interface Mark {
  at: number;
  label: string;
  color?: string;
}

const css = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const color = (name: string) => css(`--${name}`) || name;

const themed = new Set<() => void>();
export const redrawAll = () => themed.forEach((redraw) => redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

export function Chart(props: {
  label: string;
  x: number[];
  series: Series[];
  height?: number;
  unit?: string;
  format?: (value: number | null) => string;
  /** How the axis writes values, where it is not as the rest. */
  axis?: (value: number | null) => string;
  /** The x axis has steps, not times. */
  steps?: boolean;
  /** Series lie on top of each other, as areas. */
  stacked?: boolean;
  stepped?: boolean;
  log?: boolean;
  marks?: Mark[];
  /** A line that a value should stay below. */
  limit?: number | null;
  from?: number;
  until?: number;
}) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const shape = JSON.stringify([props.series.map((s) => [s.label, s.color, s.dash]), props.stacked, props.steps, props.log, props.height, props.unit]);

  useLayoutEffect(() => {
    const element = box.current!;
    const made = new uPlot(options(latest, element), data(latest.current), element);
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: latest.current.height ?? 200 }));
    watch.observe(element);
    const redraw = () => made.redraw(true, true);
    themed.add(redraw);
    return () => {
      watch.disconnect();
      themed.delete(redraw);
      made.destroy();
    };
  }, [shape]);
  useEffect(() => {
    plot.current?.setData(data(props));
  }, [props.x, props.series, props.marks, props.limit, props.from, props.until, shape]);

  return <div class="chart" ref={box} role="img" aria-label={describe(props)} style={{ height: `${props.height ?? 200}px` }} />;
}

/** The colours of a chart's series, and the line that they should stay below. */
export function Legend({ series, limit }: { series: Pick<Series, "label" | "color">[]; limit?: number | null }) {
  return (
    <>
      {series.map((each) => (
        <span key={each.label}>
          <span class="swatch" style={{ background: `var(--${each.color})` }} /> {each.label}
        </span>
      ))}
      {limit != null && <span class="bad-text">– – promised {span(limit)}</span>}
    </>
  );
}

function describe(props: { label: string; series: Series[]; format?: (value: number | null) => string; unit?: string }) {
  const values = props.series.map((series) => {
    const last = series.values.findLast((value) => value != null) ?? null;
    return `${series.label} ${(props.format ?? num)(last)}${props.unit ? ` ${props.unit}` : ""}`;
  });
  return `${props.label}. Latest: ${values.slice(0, 8).join(", ") || "no values"}.`;
}

type Props = Parameters<typeof Chart>[0];

/** Stacked areas are drawn from the sum of all down to the first series. */
function data(props: Props): uPlot.AlignedData {
  if (!props.stacked) return [props.x, ...props.series.map((series) => series.values)] as uPlot.AlignedData;
  const sums: number[][] = [];
  let below = props.x.map(() => 0);
  for (const series of props.series) {
    below = below.map((sum, index) => sum + (series.values[index] ?? 0));
    sums.push(below);
  }
  return [props.x, ...sums.reverse()] as uPlot.AlignedData;
}

function options(latest: { current: Props }, element: HTMLElement): uPlot.Options {
  const props = latest.current;
  const format = (value: number | null) => (latest.current.format ?? num)(value);
  const drawn = props.stacked ? [...props.series].reverse() : props.series;
  const font = "11px ui-sans-serif, system-ui, sans-serif";
  const axis = { stroke: () => css("--faint"), font, ticks: { show: false }, grid: { stroke: () => css("--line"), width: 1 } };
  const paths = props.stepped ? uPlot.paths.stepped!({ align: 1, extend: true }) : uPlot.paths.linear!();
  return {
    width: Math.max(element.clientWidth, 40),
    height: props.height ?? 200,
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { show: !props.stacked, size: 7 }, drag: { x: false, y: false } },
    scales: {
      x: {
        time: !props.steps,
        range: (_, least, most) => [latest.current.from ?? least ?? 0, latest.current.until ?? most ?? 1],
      },
      y: {
        distr: props.log ? 3 : 1,
        range: props.log
          ? undefined
          : (_, least, most) => {
              const top = Math.max(most ?? 0, latest.current.limit ?? 0);
              const low = props.steps && (least ?? 0) > 0 && (least ?? 0) > 0.5 * top ? (least ?? 0) * 0.98 : Math.min(0, least ?? 0);
              return [low, top > low ? top + (top - low) * 0.08 : low + 1];
            },
      },
    },
    axes: [
      { ...axis, size: 26, gap: 6, grid: { show: false }, space: 70, values: props.steps ? (_, ticks) => ticks.map((tick) => num(tick)) : (_, ticks, __, ___, step) => ticks.map((tick) => hour(tick, step)) },
      { ...axis, size: 52, gap: 4, space: 36, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : (latest.current.axis ?? format)(tick))) },
    ],
    series: [
      {},
      ...drawn.map((series) => ({
        label: series.label,
        stroke: () => color(series.color),
        fill: props.stacked ? () => `${color(series.color)}` : undefined,
        width: props.stacked ? 0 : 1.75,
        dash: series.dash ? [5, 4] : undefined,
        points: { show: false },
        spanGaps: true,
        paths,
      })),
    ],
    bands: props.stacked ? drawn.slice(1).map((_, index) => ({ series: [index + 1, index + 2] as [number, number] })) : undefined,
    hooks: { drawAxes: [(plot) => lines(plot, latest.current)] },
    plugins: [tooltip(latest, format)],
  };
}

const hour = (at_s: number, step: number) => {
  const at = new Date(at_s * 1000);
  const two = (n: number) => String(n).padStart(2, "0");
  if (step >= 86_400 || (at.getHours() === 0 && at.getMinutes() === 0 && step >= 3600)) return date(at_s);
  return `${two(at.getHours())}:${two(at.getMinutes())}${step < 60 ? `:${two(at.getSeconds())}` : ""}`;
};

function lines(plot: uPlot, props: Props) {
  const { ctx } = plot;
  const { left, top, width, height } = plot.bbox;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  if (props.limit != null) {
    const y = plot.valToPos(props.limit, "y", true);
    ctx.strokeStyle = css("--bad");
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(left + width, y);
    ctx.stroke();
  }
  for (const mark of props.marks ?? []) {
    const x = plot.valToPos(mark.at, "x", true);
    if (x < left || x > left + width) continue;
    ctx.strokeStyle = color(mark.color ?? "warn");
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
  }
  ctx.restore();
}

function tooltip(latest: { current: Props }, format: (value: number | null) => string): uPlot.Plugin {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  return {
    hooks: {
      init: (plot) => void plot.over.appendChild(tip),
      setCursor: (plot) => {
        const { idx, left } = plot.cursor;
        const props = latest.current;
        if (idx == null || left == null || left < 0 || props.x[idx] === undefined) {
          tip.hidden = true;
          return;
        }
        const at = props.x[idx];
        const head = document.createElement("b");
        head.textContent = props.steps ? `step ${num(at)}` : when(at);
        const rows = (props.stacked ? [...props.series].reverse() : props.series)
          .filter((series) => series.values[idx] != null && (!props.stacked || series.values[idx]))
          .map((series) => {
            const row = document.createElement("div");
            const dot = document.createElement("i");
            dot.style.background = color(series.color);
            const value = document.createElement("span");
            value.textContent = `${format(series.values[idx]!)}${props.unit ? ` ${props.unit}` : ""}`;
            row.append(dot, series.label, value);
            return row;
          });
        const near = (props.marks ?? []).filter((mark) => Math.abs(plot.valToPos(mark.at, "x") - left) < 6);
        const notes = near.map((mark) => {
          const row = document.createElement("em");
          row.textContent = mark.label;
          return row;
        });
        tip.replaceChildren(head, ...rows, ...notes);
        tip.hidden = false;
        const width = plot.over.clientWidth;
        tip.style.left = left > width / 2 ? "" : `${left + 14}px`;
        tip.style.right = left > width / 2 ? `${width - left + 14}px` : "";
      },
    },
  };
}

/** A line without axes, for a row of a table. */
export function Spark({ values, color: name = "accent", label }: { values: (number | null)[]; color?: string; label: string }) {
  const known = values.filter((value): value is number => value != null);
  if (known.length < 2) return <span class="spark" aria-hidden="true" />;
  const most = Math.max(...known, 1e-9);
  const points = values.map((value, index) => (value == null ? "" : `${((index / (values.length - 1)) * 100).toFixed(1)},${(23 - (value / most) * 20).toFixed(1)}`));
  return (
    <svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label={label}>
      <polyline points={points.join(" ")} fill="none" stroke={`var(--${name})`} stroke-width="1.5" vector-effect="non-scaling-stroke" />
    </svg>
  );
}
