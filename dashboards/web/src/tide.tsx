// The tide: what the fleet was used for, stacked over time, out of the ledger.
import { useMemo, useState } from "preact/hooks";

import { get } from "./api";
import { Chart, type Series } from "./chart";
import { USE_NAMES } from "./fleet";
import { num, usd } from "./format";
import { Card, Choice, Empty, Problem, Skeleton, useLoad } from "./ui";
import { USES, type Use } from "./types";

export interface TideData {
  at_s: number;
  from_s: number;
  step_s: number;
  series: { use: Use; market: string; gpu_h: number[]; cpu_h: number[]; micro_usd: number[] }[];
}

const RANGES = [
  ["6h", "6 h"],
  ["24h", "24 h"],
  ["7d", "7 d"],
] as const;
const SPANS = { "6h": [6 * 3600, 300], "24h": [86_400, 900], "7d": [7 * 86_400, 7200] };
type Field = "gpu_h" | "cpu_h" | "micro_usd";

export function TideCard() {
  const [range, setRange] = useState<"6h" | "24h" | "7d">("24h");
  const [chosen, setField] = useState<Field | null>(null);
  const [since_s, step_s] = SPANS[range];
  const { data, error } = useLoad((signal) => get<TideData>("/v1/tide", { since_s, step_s }, signal), [range], 20_000);
  const has = (field: Field) => data?.series.some((series) => series[field].some((value) => value > 0)) ?? false;
  const field = chosen ?? (has("gpu_h") || !has("cpu_h") ? "gpu_h" : "cpu_h");
  const drawn = useMemo(() => (data ? stack(data, field) : null), [data, field]);
  const unit = { gpu_h: "GPU-hours", cpu_h: "CPU-hours", micro_usd: "Dollars" }[field];
  const spot = data ? share(data, field) : null;

  return (
    <Card
      title={`${unit} by use`}
      cmd="raytide cost --by day"
      aside={
        <>
          {spot != null && <span class="wide-only">{Math.round(spot * 100)} % on spot</span>}
          <Choice
            label="Unit"
            value={field}
            onChange={setField}
            options={[
              ["gpu_h", "GPU"],
              ["cpu_h", "CPU"],
              ["micro_usd", "$"],
            ]}
          />
          <Choice label="Range" value={range} onChange={setRange} options={RANGES} />
        </>
      }
    >
      {error && !data ? (
        <Problem error={error} />
      ) : !drawn ? (
        <Skeleton height={276} />
      ) : drawn.series.length === 0 ? (
        <div style={{ minHeight: "276px" }}>
          <Empty title={data!.series.length ? `No ${unit} in this time` : "The tide is out: nothing has run yet"} cmd="raytide demo">
            {data!.series.length ? "Choose another unit or a longer time." : "Submit a job or serve a model, and what it uses appears here within a minute."}
          </Empty>
        </div>
      ) : (
        <>
          <Chart
            label={`${unit} by use`}
            x={drawn.x}
            series={drawn.series}
            height={240}
            stacked
            stepped
            from={data!.from_s}
            until={data!.from_s + drawn.x.length * data!.step_s}
            unit={field === "micro_usd" ? "an hour" : field === "gpu_h" ? "GPUs" : "CPUs"}
            format={field === "micro_usd" ? (value) => usd(value == null ? null : value) : num}
          />
          <ul class="legend">
            {drawn.totals.map(([use, total]) => (
              <li key={use}>
                <span class="swatch" style={{ background: `var(--${use})` }} />
                {USE_NAMES[use]} <b>{field === "micro_usd" ? usd(total) : `${num(total)} h`}</b>
              </li>
            ))}
          </ul>
        </>
      )}
    </Card>
  );
}

function stack(data: TideData, field: Field) {
  const count = data.series[0]?.gpu_h.length ?? 0;
  const x = Array.from({ length: count }, (_, index) => data.from_s + index * data.step_s);
  const last_h = Math.max(60, data.at_s - x[count - 1]) / 3600;
  const hours = x.map((_, index) => (index === count - 1 ? Math.min(last_h, data.step_s / 3600) : data.step_s / 3600));
  const totals: [Use, number][] = [];
  const series: Series[] = [];
  for (const use of USES) {
    const rows = data.series.filter((each) => each.use === use);
    const sums = x.map((_, index) => rows.reduce((sum, row) => sum + row[field][index], 0));
    const total = sums.reduce((a, b) => a + b, 0);
    if (total <= 0) continue;
    totals.push([use, total]);
    series.push({ label: USE_NAMES[use], color: use, values: sums.map((sum, index) => sum / hours[index]) });
  }
  return { x, series, totals };
}

function share(data: TideData, field: Field): number | null {
  const sum = (market?: string) =>
    data.series.filter((each) => !market || each.market === market).reduce((total, each) => total + each[field].reduce((a, b) => a + b, 0), 0);
  const all = sum();
  return all > 0 ? sum("spot") / all : null;
}
