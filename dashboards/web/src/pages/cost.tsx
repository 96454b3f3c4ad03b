// Where the money goes: by team, job, model, node or day, down to the entries of the ledger.
import { useMemo, useState } from "preact/hooks";

import { get } from "../api";
import { Chart } from "../chart";
import { byDay } from "../days";
import { budgetsOf } from "../fleet";
import { num, percent, usd } from "../format";
import { now as clock, useLive } from "../live";
import type { Place } from "../routes";
import { Table, type Column } from "../table";
import { TideCard } from "../tide";
import { Card, Choice, Empty, Meter, Problem, Skeleton, Stat, useLoad } from "../ui";
import { Ledger } from "./capacity";
import { PageHead } from "./head";

interface CostRow {
  key: string;
  amount_micro_usd: number;
  micro_usd_h: number;
  forecast_micro_usd: number;
  lost_micro_usd: number;
  lost_to: string[];
  energy_mj: number;
}

interface CostTable {
  rows: CostRow[];
  total_micro_usd: number;
  forecast_micro_usd: number;
  grams_co2_per_kwh: number;
}

interface Report {
  booked_micro_usd: number;
  accrued_micro_usd: number;
  billed_micro_usd: number;
  booked_ended_micro_usd: number;
}

const BY = [
  ["team", "Team"],
  ["project", "Project"],
  ["job", "Job or endpoint"],
  ["model", "Model"],
  ["node", "Node"],
  ["day", "Day"],
] as const;
type By = (typeof BY)[number][0];
const SINCE = [
  ["all", "All time"],
  ["30d", "30 d"],
  ["7d", "7 d"],
  ["1d", "1 d"],
] as const;
const DAYS: Record<string, number> = { "30d": 30, "7d": 7, "1d": 1 };

export function Cost({ at }: { at: Place }) {
  return at.rest ? <Entries subject={at.rest} key={at.rest} /> : <AllCosts />;
}

function AllCosts() {
  const now = useLive();
  const [by, setBy] = useState<By>("team");
  const [since, setSince] = useState<"all" | "30d" | "7d" | "1d">("all");
  const since_s = () => (DAYS[since] ? clock() - DAYS[since] * 86_400 : 0);
  const table = useLoad((signal) => get<CostTable>(`/v1/cost/${by}`, DAYS[since] ? { since_s: since_s() } : {}, signal), [by, since], 15_000);
  const report = useLoad((signal) => get<Report>("/v1/cost", {}, signal), [], 15_000);
  const days = useLoad((signal) => get<CostTable>("/v1/cost/day", { since_s: clock() - 30 * 86_400 }, signal), [], 60_000);
  const { usd: budget, spent_micro_usd: spent } = budgetsOf(now.teams);
  const energy_mj = (table.data?.rows ?? []).reduce((sum, row) => sum + row.energy_mj, 0);
  const columns = useMemo(() => columnsOf(by, table.data?.total_micro_usd ?? 0, energy_mj > 0 ? (table.data?.grams_co2_per_kwh ?? 0) : null), [by, table.data?.total_micro_usd, energy_mj > 0]);
  const drawn = useMemo(() => (days.data && days.data.rows.length > 2 ? byDay(days.data.rows) : null), [days.data]);
  const whole = report.data ? report.data.booked_micro_usd + report.data.accrued_micro_usd : null;
  const isBalanced = report.data && report.data.billed_micro_usd === report.data.booked_ended_micro_usd;
  return (
    <>
      <PageHead title="Cost" sub={now.hello && now.hello.team !== "*" ? `of team ${now.hello.team}` : undefined} />
      <div class="grid">
        <div class="stats four">
          <Stat label="So far" cmd="raytide cost" value={usd(whole)} note={report.data ? `${usd(report.data.accrued_micro_usd)} of it not booked yet` : " "} />
          <Stat label="Now" cmd="raytide cost" value={usd(now.status?.price_micro_usd_h)} unit="/h" note={now.status ? `${usd(now.status.price_micro_usd_h * 24)} a day at this rate` : " "} />
          <Stat label="Budgets" cmd="raytide budget" value={budget ? percent(spent / 1e6 / budget) : "none"} share={budget ? spent / 1e6 / budget : null} tone={budget && spent / 1e6 > budget ? "bad" : budget && spent / 1e6 > 0.8 * budget ? "warn" : undefined} note={budget ? `${usd(spent)} of $${num(budget)} this month` : "raytide budget set TEAM USD"} />
          <Stat label="The books" cmd="raytide cost" value={report.data ? (isBalanced ? "Balanced" : "Differ") : "–"} tone={report.data && !isBalanced ? "bad" : undefined} note={report.data ? `${usd(report.data.billed_micro_usd)} billed for ended nodes` : " "} />
        </div>
        <Card
          title={`Cost by ${BY.find(([id]) => id === by)![1].toLowerCase()}`}
          cmd={`raytide cost --by ${by}${DAYS[since] ? ` --since ${since}` : ""} --forecast`}
          flush
          aside={
            <>
              <Choice label="Since" value={since} onChange={setSince} options={SINCE} />
              <Choice label="By" value={by} onChange={setBy} options={BY} />
            </>
          }
        >
          {table.error && !table.data ? (
            <Problem error={table.error} />
          ) : !table.data ? (
            <Skeleton height={260} />
          ) : table.data.rows.length === 0 ? (
            <Empty title="Nothing was spent in this time" />
          ) : (
            <Table label={`Cost by ${by}`} columns={columns} rows={table.data.rows} id={(row) => row.key} href={by === "job" ? (row) => (row.key.startsWith("(") ? "" : `#/cost/${row.key}`) : by === "node" ? (row) => `#/capacity/${row.key}` : undefined} height={460} search={(row) => `${row.key} ${NAMES[row.key] ?? ""}`} />
          )}
        </Card>
        <TideCard />
        {drawn && (
          <Card title="By day" cmd="raytide cost --by day">
            <Chart label="Dollars by day" x={drawn.x} series={[{ label: "cost", color: "training", values: drawn.values }]} height={180} stacked stepped until={drawn.until} format={(value) => usd(value)} />
          </Card>
        )}
      </div>
    </>
  );
}

const NAMES: Record<string, string> = { "(idle)": "Idle: ready and free", "(startup)": "Starting: paid, not ready", "(waste)": "Lost work", "(unmanaged)": "Unmanaged" };

const MJ_PER_KWH = 3.6e9;

/** `grams_co2` per kWh; null leaves the energy out, because none is known. */
function columnsOf(by: By, total: number, grams_co2: number | null): Column<CostRow>[] {
  const energy: Column<CostRow> = {
    key: "energy",
    title: "Energy",
    width: "minmax(104px, 0.6fr)",
    end: true,
    from: "medium",
    sort: (row) => row.energy_mj,
    cell: (row) => {
      const kwh = row.energy_mj / MJ_PER_KWH;
      return kwh ? (
        <>
          {num(kwh)} kWh
          {grams_co2 ? <span class="sub-line" title="estimated from the energy">≈ {num((kwh * grams_co2) / 1000)} kg CO₂</span> : null}
        </>
      ) : (
        <span class="faint">–</span>
      );
    },
  };
  return [
    {
      key: "key",
      title: BY.find(([id]) => id === by)![1],
      width: "minmax(96px, 1.4fr)",
      sort: (row) => row.key,
      cell: (row) => <span class="strong">{by === "job" && !row.key.startsWith("(") ? <a href={`#/cost/${row.key}`}>{row.key}</a> : (NAMES[row.key] ?? row.key)}</span>,
    },
    { key: "amount", title: "Cost", width: "92px", end: true, sort: (row) => row.amount_micro_usd, cell: (row) => <span title={`${row.amount_micro_usd} micro-dollars`}>{usd(row.amount_micro_usd)}</span> },
    { key: "share", title: "Share", width: "minmax(70px, 0.9fr)", sort: (row) => row.amount_micro_usd, cell: (row) => <>{total ? percent(row.amount_micro_usd / total) : "–"}<Meter share={total ? row.amount_micro_usd / total : 0} label={percent(total ? row.amount_micro_usd / total : 0)} /></> },
    { key: "rate", title: "Now", width: "84px", end: true, from: "medium", sort: (row) => row.micro_usd_h, cell: (row) => (row.micro_usd_h ? `${usd(row.micro_usd_h)}/h` : <span class="faint">–</span>) },
    { key: "forecast", title: by === "day" ? "At midnight" : "Month's end", width: "100px", end: true, from: "medium", sort: (row) => row.forecast_micro_usd, cell: (row) => usd(row.forecast_micro_usd) },
    { key: "lost", title: "Lost work", width: "minmax(84px, 0.7fr)", end: true, from: "wide", sort: (row) => row.lost_micro_usd, cell: (row) => (row.lost_micro_usd ? <>{usd(row.lost_micro_usd)}<span class="sub-line">to {row.lost_to.slice(0, 2).join(", ")}</span></> : <span class="faint">–</span>) },
    ...(grams_co2 === null ? [] : [energy]),
  ];
}

interface Entry {
  node_id: string;
  from_us: number;
  to_us: number;
  kind: string;
  subject: string;
  team: string;
  amount_micro_usd: number;
  is_reversal: boolean;
  cause: string;
}

const PAGE = 100;

function Entries({ subject }: { subject: string }) {
  const [limit, setLimit] = useState(PAGE);
  const { data, error } = useLoad((signal) => get<Entry[]>("/v1/ledger", { subject, limit }, signal), [subject, limit], 20_000);
  const isJob = /^job-\d+$/.test(subject);
  const sum = (data ?? []).reduce((total, entry) => total + entry.amount_micro_usd, 0);
  return (
    <>
      <PageHead title={subject} crumb={["Cost", "#/cost"]} sub={<a href={isJob ? `#/runs/${subject}` : `#/endpoints/${subject}`}>{isJob ? "The job" : "The endpoint"}</a>} />
      <Card title="Entries of the ledger" cmd="raytide cost --by job" flush aside={data && `${num(data.length)} entries, ${usd(sum)}`}>
        {error && !data ? (
          <Problem error={error} />
        ) : !data ? (
          <Skeleton height={300} />
        ) : data.length === 0 ? (
          <Empty title="Nothing is booked yet">An entry is booked about once a minute while it holds a node.</Empty>
        ) : (
          <>
            <Ledger entries={data} withNode />
            {data.length >= limit && limit < 1000 && (
              <p style={{ padding: "10px 16px" }}>
                <button type="button" class="button plain" onClick={() => setLimit(Math.min(1000, limit * 3))}>
                  Load older entries
                </button>
              </p>
            )}
          </>
        )}
      </Card>
    </>
  );
}
