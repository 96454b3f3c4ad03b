// What is served: latencies against the promise, caches, replicas with their cold starts, rollouts with intervals.
import { useEffect, useMemo, useState } from "preact/hooks";

import { get } from "../api";
import { Chart, Legend, Spark, type Series } from "../chart";
import { burnOf } from "../fleet";
import { num, percent, plural, span, usd } from "../format";
import { seenOf, stored, type Curve } from "../history";
import { now as clock, useLive } from "../live";
import type { Place } from "../routes";
import { Table, type Column } from "../table";
import type { Endpoint } from "../types";
import { Card, Choice, Cmd, Empty, Meter, Pairs, Problem, Skeleton, Stat, State, useLoad, When } from "../ui";
import { PageHead } from "./head";

export function Endpoints({ at }: { at: Place }) {
  return at.rest ? <OneEndpoint name={at.rest} key={at.rest} /> : <AllEndpoints />;
}

const isLate = (e: Endpoint) => e.slo_ttft_s != null && e.ttft_s != null && e.ttft_s > e.slo_ttft_s;

const COLUMNS: Column<Endpoint>[] = [
  {
    key: "name",
    title: "Endpoint",
    width: "minmax(84px, 1.6fr)",
    sort: (e) => e.id,
    cell: (e) => (
      <>
        <a class="strong" href={`#/endpoints/${e.id}`}>
          {e.id}
        </a>
        <span class="sub-line" title={e.model}>
          {e.is_hosted ? "hosted" : e.model}
        </span>
      </>
    ),
  },
  { key: "state", title: "State", width: "88px", sort: (e) => e.state, cell: (e) => <State of={e.state} title={e.reason || e.waiting} /> },
  { key: "team", title: "Team", width: "minmax(70px, 0.6fr)", from: "wide", sort: (e) => e.team, cell: (e) => e.team },
  {
    key: "replicas",
    title: "Replicas",
    width: "84px",
    end: true,
    from: "medium",
    sort: (e) => e.ready,
    cell: (e) => (
      <span title={`${e.min} to ${e.max}`}>
        {e.ready} <span class="faint">of {e.target}</span>
      </span>
    ),
  },
  { key: "rps", title: "Requests/s", width: "84px", end: true, from: "medium", sort: (e) => e.rps, cell: (e) => num(e.rps) },
  {
    key: "ttft",
    title: "First token",
    width: "80px",
    end: true,
    sort: (e) => e.ttft_s,
    cell: (e) => (
      <>
        <span class={isLate(e) ? "bad-text strong" : ""}>{span(e.ttft_s)}</span>
        {e.slo_ttft_s != null && <span class="sub-line">of {span(e.slo_ttft_s)}</span>}
      </>
    ),
  },
  {
    key: "kv",
    title: "KV cache",
    width: "92px",
    from: "wide",
    sort: (e) => e.kv_use,
    cell: (e) =>
      e.kv_use == null ? (
        "–"
      ) : (
        <>
          {percent(e.kv_use)}
          <Meter share={e.kv_use} tone={e.kv_use > 0.95 ? "bad" : e.kv_use > 0.85 ? "warn" : undefined} label={`KV cache ${percent(e.kv_use)}`} />
        </>
      ),
  },
  { key: "tps", title: "Tokens/s", width: "72px", end: true, from: "wide", sort: (e) => e.tps, cell: (e) => num(e.tps) },
  { key: "trend", title: "Lately", width: "84px", from: "wide", cell: (e) => <Spark values={seenOf(e.id)?.values.tps.slice(-120) ?? []} color="serving" label={`${num(e.tps)} tokens a second`} /> },
  { key: "cost", title: "Cost", width: "76px", end: true, from: "medium", sort: (e) => e.cost_micro_usd, cell: (e) => usd(e.cost_micro_usd) },
];

function AllEndpoints() {
  const now = useLive();
  const all = useMemo(() => [...now.endpoints.values()].sort((a, b) => a.id.localeCompare(b.id)), [now.endpoints]);
  const sum = (of: (e: Endpoint) => number) => all.reduce((total, each) => total + of(each), 0);
  const burns = all.map((e) => burnOf(e)).filter((burn): burn is number => burn != null);
  return (
    <>
      <PageHead title="Endpoints" sub={now.status && plural(all.length, "endpoint")} />
      <div class="grid">
        {!now.status ? (
          <Skeleton height={110} />
        ) : (
          <div class="stats four">
            <Stat label="Requests" cmd="raytide serve" value={num(sum((e) => e.rps))} unit="/s" note={`${num(sum((e) => e.ongoing))} in flight, ${num(sum((e) => e.queued))} queued`} />
            <Stat label="Generated" cmd="raytide usage" value={num(sum((e) => e.tps))} unit="tokens/s" note={`${num(sum((e) => e.prompt_tps))} prompt tokens/s`} />
            <Stat label="Replicas" cmd="raytide serve" value={num(sum((e) => e.ready))} unit={`of ${num(sum((e) => e.target))}`} note={`${num(sum((e) => e.starting))} starting`} />
            <Stat
              label="Late now"
              cmd="raytide serve --json"
              value={num(all.filter(isLate).length)}
              tone={all.some(isLate) ? "bad" : undefined}
              unit={all.filter(isLate).length === 1 ? "endpoint" : "endpoints"}
              note={burns.length ? `highest SLO burn ${num(Math.max(...burns))}×` : "first tokens against their SLO"}
            />
          </div>
        )}
        <Card title="All endpoints" cmd="raytide serve" flush>
          {!now.status ? (
            <Skeleton height={240} />
          ) : all.length === 0 ? (
            <Empty title="Nothing is served yet" cmd="raytide serve MODEL --name chat">
              Serve a directory, a URL or a registered model; it answers OpenAI's API.
            </Empty>
          ) : (
            <Table label="Endpoints" columns={COLUMNS} rows={all} id={(e) => e.id} href={(e) => `#/endpoints/${e.id}`} height={620} search={(e) => `${e.id} ${e.team} ${e.model} ${e.state}`} />
          )}
        </Card>
      </div>
    </>
  );
}

const RANGES = [
  ["15m", "15 min"],
  ["1h", "1 h"],
  ["24h", "24 h"],
] as const;
const SPANS = { "15m": [900, 15], "1h": [3600, 60], "24h": [86_400, 900] } as const;

function OneEndpoint({ name }: { name: string }) {
  const now = useLive();
  const endpoint = now.endpoints.get(name);
  const [range, setRange] = useState<"15m" | "1h" | "24h">("15m");
  if (!now.status) return <Skeleton height={400} />;
  if (!endpoint)
    return (
      <>
        <PageHead title={name} crumb={["Endpoints", "#/endpoints"]} />
        <Card title="No such endpoint">
          <Empty title={`Nothing is served as ${name}`} cmd="raytide serve" />
        </Card>
      </>
    );
  const burn = burnOf(endpoint);
  return (
    <>
      <PageHead title={name} crumb={["Endpoints", "#/endpoints"]} sub={<State of={endpoint.state} title={endpoint.reason} />}>
        <Choice label="Range" value={range} onChange={setRange} options={RANGES} />
      </PageHead>
      {(endpoint.reason || endpoint.waiting) && endpoint.state !== "running" && <div class="notice">{endpoint.reason || endpoint.waiting}</div>}
      {endpoint.state === "running" && endpoint.waiting && <div class="notice">{endpoint.waiting}</div>}
      <div class="grid">
        <div class="stats five">
          <Stat label="First token" cmd="raytide serve" value={span(endpoint.ttft_s)} tone={isLate(endpoint) ? "bad" : undefined} note={endpoint.slo_ttft_s != null ? `promised within ${span(endpoint.slo_ttft_s)}` : "nothing is promised"} />
          <Stat label="SLO burn" cmd={`raytide serve --json`} value={burn == null ? "–" : `${num(burn)}×`} tone={burn != null && burn > 14.4 ? "bad" : burn != null && burn > 1 ? "warn" : undefined} note={endpoint.slo_target != null ? `${percent(endpoint.slo_target, 1)} should be in time` : "no target"} />
          <Stat label="Requests" cmd={`raytide usage --model ${name}`} value={num(endpoint.rps)} unit="/s" note={`${num(endpoint.ongoing)} in flight, ${num(endpoint.queued)} queued`} />
          <Stat label="KV cache" cmd="raytide serve" value={percent(endpoint.kv_use)} share={endpoint.kv_use ?? 0} note="mean of the replicas" />
          <Stat label="Replicas" cmd="raytide serve" value={endpoint.ready} unit={`of ${endpoint.target}`} note={endpoint.starting ? `${endpoint.starting} starting` : `${endpoint.min} to ${endpoint.max}`} noteTitle={`between ${endpoint.min} and ${endpoint.max}, ${endpoint.starting} starting`} />
        </div>
        <Latency endpoint={endpoint} range={range} />
        <div class="half">
          <Curves title="Throughput" endpoint={endpoint} range={range} field="tps" metric="raytide_endpoint_output_tokens_per_second" color="serving" unit="tokens/s" />
        </div>
        <div class="half">
          <Curves title="KV cache" endpoint={endpoint} range={range} field="kv_use" metric="raytide_endpoint_kv_use_ratio" color="batch" unit="" format={(value) => percent(value)} />
        </div>
        <Replicas endpoint={endpoint} />
        <div class="half">
          <ColdStarts name={name} />
        </div>
        <div class="half">
          <About endpoint={endpoint} />
        </div>
        <Rollouts name={name} />
      </div>
    </>
  );
}

const QUANTILES = [
  [0.5, "median", "serving"],
  [0.95, "95 %", "unmanaged"],
  [0.99, "99 %", "lost"],
] as const;

function Latency({ endpoint, range }: { endpoint: Endpoint; range: keyof typeof SPANS }) {
  const [since_s, step_s] = SPANS[range];
  const { data } = useLoad(
    (signal) => Promise.all(QUANTILES.map(([quantile]) => stored("raytide_time_to_first_token_seconds", { since_s, step_s, quantile, endpoint: endpoint.id }, signal))),
    [endpoint.id, range],
    15_000,
  );
  const has = data?.some((curves) => curves?.some((curve) => curve.points.length > 1));
  const seen = seenOf(endpoint.id);
  const aligned = has ? align(data!.map((curves) => curves ?? [])) : null;
  const series: Series[] = aligned
    ? QUANTILES.map(([, label, color], index) => ({ label, color, values: aligned.values[index] }))
    : [{ label: "mean", color: "serving", values: seen?.values.ttft_s ?? [] }];
  return (
    <Card title="Time to first token" cmd="raytide serve" aside={<Legend series={series} limit={endpoint.slo_ttft_s} />}>
      <Chart label={`Time to first token of ${endpoint.id}`} x={aligned?.x ?? seen?.at ?? []} series={series} height={210} format={(value) => span(value)} limit={endpoint.slo_ttft_s} from={aligned ? clock() - since_s : undefined} />
      {!aligned && <Since />}
    </Card>
  );
}

const Since = () => <p class="faint">The curves begin when this page was opened, until the monitor has collected more.</p>;

function align(groups: Curve[][]): { x: number[]; values: (number | null)[][] } {
  const x = [...new Set(groups.flatMap((curves) => curves.flatMap((curve) => curve.points.map(([at]) => at))))].sort((a, b) => a - b);
  const values = groups.map((curves) => {
    const sums = new Map<number, number>();
    for (const curve of curves) for (const [at, value] of curve.points) if (Number.isFinite(value)) sums.set(at, Math.max(sums.get(at) ?? 0, value));
    return x.map((at) => sums.get(at) ?? null);
  });
  return { x, values };
}

function Curves(props: { title: string; endpoint: Endpoint; range: keyof typeof SPANS; field: "tps" | "kv_use"; metric: string; color: string; unit: string; format?: (value: number | null) => string }) {
  const [since_s, step_s] = SPANS[props.range];
  const { data } = useLoad((signal) => stored(props.metric, { since_s, step_s, endpoint: props.endpoint.id }, signal), [props.endpoint.id, props.range], 15_000);
  const aligned = data?.some((curve) => curve.points.length > 1) ? align([data]) : null;
  const seen = seenOf(props.endpoint.id);
  const series: Series[] = [{ label: props.title, color: props.color, values: aligned?.values[0] ?? seen?.values[props.field] ?? [] }];
  return (
    <Card title={props.title} cmd="raytide serve" aside={props.unit}>
      <Chart label={`${props.title} of ${props.endpoint.id}`} x={aligned?.x ?? seen?.at ?? []} series={series} height={170} unit={props.unit} format={props.format} from={aligned ? clock() - since_s : undefined} />
    </Card>
  );
}

const REPLICA_COLUMNS: Column<Endpoint["replicas"][number]>[] = [
  { key: "id", title: "Replica", width: "minmax(96px, 1.4fr)", sort: (replica) => replica.id, cell: (replica) => <span class="mono" title={replica.id}>{replica.id}</span> },
  { key: "running", title: "Running", width: "60px", end: true, sort: (replica) => replica.running, cell: (replica) => num(Math.round(replica.running)) },
  { key: "waiting", title: "Waiting", width: "60px", end: true, sort: (replica) => replica.waiting, cell: (replica) => <span class={replica.waiting >= 1 ? "warn-text" : ""}>{num(Math.round(replica.waiting))}</span> },
  {
    key: "kv",
    title: "KV cache",
    width: "minmax(64px, 1fr)",
    sort: (replica) => replica.kv_use,
    cell: (replica) => (
      <>
        {percent(replica.kv_use)}
        <Meter share={replica.kv_use} tone={replica.kv_use > 0.95 ? "bad" : replica.kv_use > 0.85 ? "warn" : undefined} label={`KV cache ${percent(replica.kv_use)}`} />
      </>
    ),
  },
];

function Replicas({ endpoint }: { endpoint: Endpoint }) {
  return (
    <Card title="Replicas" cmd="raytide serve" flush>
      {endpoint.replicas.length === 0 ? (
        <Empty title={endpoint.is_hosted ? "A hosted API answers" : "No replica answers"}>{endpoint.is_hosted ? "" : endpoint.min === 0 ? "It is scaled to zero; the next request starts one." : endpoint.waiting || "They are starting."}</Empty>
      ) : (
        <Table label="Replicas" columns={REPLICA_COLUMNS} rows={endpoint.replicas} id={(replica) => replica.id} search={(replica) => replica.id} height={480} />
      )}
    </Card>
  );
}

interface Startup {
  id: string;
  ordered_at_s: number;
  phases: [string, number][];
  is_ready: boolean;
  detail: string;
}

const PHASES: Record<string, string> = { node: "starting", process: "idle", stage: "batch", load: "training", "warm-up": "serving" };

function ColdStarts({ name }: { name: string }) {
  const { data, error } = useLoad((signal) => get<{ startups: Startup[]; cold_start_s: number; cold_start_is_learned: boolean }>(`/v1/endpoints/${name}`, {}, signal), [name], 5000);
  const starts = [...(data?.startups ?? [])].sort((a, b) => b.ordered_at_s - a.ordered_at_s).slice(0, 8);
  const longest = Math.max(1, ...starts.map((start) => start.phases.reduce((sum, [, seconds]) => sum + seconds, 0)));
  const shown = [...new Set(starts.flatMap((start) => start.phases.map(([phase]) => phase)))];
  return (
    <Card title="Cold starts" cmd={`raytide endpoint startup ${name}`} aside={data && <span>{data.cold_start_is_learned ? "learned" : "expected"} {span(data.cold_start_s)}</span>}>
      {error && !data ? (
        <Problem error={error} />
      ) : !data ? (
        <Skeleton height={120} />
      ) : starts.length === 0 ? (
        <Empty title="No start was seen yet" />
      ) : (
        <>
          <div class="waterfall">
            {starts.map((start) => {
              const total = start.phases.reduce((sum, [, seconds]) => sum + seconds, 0);
              return (
                <div class="bar" key={start.id} title={start.phases.map(([phase, seconds]) => `${phase} ${span(seconds)}`).join(", ")}>
                  <span class="clip mono">{start.id.split("#").at(-1)!.slice(-10)}</span>
                  <span class="track" role="img" aria-label={start.phases.map(([phase, seconds]) => `${phase} ${span(seconds)}`).join(", ")}>
                    {start.phases.map(([phase, seconds]) => (
                      <span key={phase} style={{ width: `${(seconds / longest) * 100}%`, background: `var(--${PHASES[phase] ?? "idle"})` }} />
                    ))}
                  </span>
                  <span class="end">{start.is_ready ? span(total) : <span class="faint" title={start.detail}>{span(total)} …</span>}</span>
                </div>
              );
            })}
          </div>
          <ul class="legend">
            {shown.map((phase) => (
              <li key={phase}>
                <span class="swatch" style={{ background: `var(--${PHASES[phase] ?? "idle"})` }} />
                {phase}
              </li>
            ))}
          </ul>
        </>
      )}
    </Card>
  );
}

function About({ endpoint }: { endpoint: Endpoint }) {
  const curl = `curl ${endpoint.base_url}/chat/completions -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" -d '{"model": "${endpoint.id}", "messages": [{"role": "user", "content": "hello"}]}'`;
  return (
    <Card title="About" cmd={`raytide serve --json`}>
      <Pairs
        rows={[
          ["Model", endpoint.model],
          ["Team", endpoint.team],
          ["Served by", endpoint.user],
          ["Since", <When at={endpoint.created_at_s} />],
          ["Revision", endpoint.revision || "–"],
          ["Cost so far", usd(endpoint.cost_micro_usd)],
          ["Expected cold start", span(endpoint.cold_start_s)],
          ["Forecast", `${num(endpoint.ahead_rps)} requests/s`],
          [
            "Base URL",
            <>
              <code>{endpoint.base_url}</code> <Cmd run={curl} />
            </>,
          ],
        ]}
      />
    </Card>
  );
}

interface Outcome {
  revision: number;
  version: string;
  counts: { requests: number; errors: number; started: number; first_token_ms: number };
  shares: Record<string, [number, number, number]>;
}

interface RolloutStatus {
  rollout: { number: number; kind: string; state: string; percent: number; reason: string; why: string; user: string; created_at_s: number; decided_at_s: number | null };
  champion: Outcome;
  challenger: Outcome;
}

function Rollouts({ name }: { name: string }) {
  const { data, error } = useLoad((signal) => get<RolloutStatus[]>(`/v1/endpoints/${name}/rollouts`, { limit: 5 }, signal), [name], 10_000);
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => tick((n) => n + 1), 30_000);
    return () => clearInterval(timer);
  }, []);
  if (error && !data)
    return (
      <Card title="Rollouts">
        <Problem error={error} />
      </Card>
    );
  return (
    <Card title="Rollouts" cmd={`raytide endpoint rollout ${name}`} flush>
      {!data ? (
        <Skeleton height={90} />
      ) : data.length === 0 ? (
        <Empty title="No revision was rolled out beside another" cmd={`raytide serve MODEL --name ${name} --canary defaults`}>
          A canary, a shadow or an A/B test shows here with the intervals that decide it.
        </Empty>
      ) : (
        <div class="scroll" role="group" aria-label="Table" tabIndex={0}>
          <table class="plain">
            <thead>
              <tr>
                <th>Rollout</th>
                <th>State</th>
                <th>Criterion</th>
                <th>Champion</th>
                <th>Challenger</th>
                <th style={{ width: "22%" }}>95 % intervals</th>
              </tr>
            </thead>
            <tbody>
              {data.flatMap((status) => {
                const criteria = Object.keys({ ...status.champion.shares, ...status.challenger.shares });
                const rows = criteria.length ? criteria : [""];
                return rows.map((criterion, index) => (
                  <tr key={`${status.rollout.number}-${criterion}`}>
                    <td>
                      {index === 0 && (
                        <>
                          <span class="strong">{status.rollout.kind}</span> <span class="faint">to {Math.round(status.rollout.percent)} %</span>
                          <span class="sub-line">
                            revision {status.challenger.revision} beside {status.champion.revision}, <When at={status.rollout.created_at_s} />
                          </span>
                        </>
                      )}
                    </td>
                    <td>{index === 0 && <State of={status.rollout.state} title={status.rollout.reason} />}</td>
                    <td>{criterion.replace("_", " ") || "–"}</td>
                    <td>{shareText(status.champion.shares[criterion])}</td>
                    <td>{shareText(status.challenger.shares[criterion])}</td>
                    <td>
                      <Interval champion={status.champion.shares[criterion]} challenger={status.challenger.shares[criterion]} />
                    </td>
                  </tr>
                ));
              })}
            </tbody>
          </table>
        </div>
      )}
    </Card>
  );
}

const shareText = (share?: [number, number, number]) => (share ? `${percent(share[0], 1)} (${percent(share[1], 1)} – ${percent(share[2], 1)})` : "–");

function Interval({ champion, challenger }: { champion?: [number, number, number]; challenger?: [number, number, number] }) {
  const most = Math.max(0.01, champion?.[2] ?? 0, challenger?.[2] ?? 0);
  const bar = (share: [number, number, number] | undefined, color: string) =>
    share && (
      <div class="interval" title={shareText(share)}>
        <span style={{ left: `${(share[1] / most) * 100}%`, width: `${Math.max(1, ((share[2] - share[1]) / most) * 100)}%`, background: `var(--${color})` }} />
        <i style={{ left: `${(share[0] / most) * 100}%`, background: `var(--${color})` }} />
      </div>
    );
  return (
    <div>
      {bar(champion, "training")}
      {bar(challenger, "unmanaged")}
    </div>
  );
}
