// The home page: is the fleet busy, what does it cost, does anything need me?
import { useEffect, useRef } from "preact/hooks";

import { budgetsOf, burnOf, fleetOf, isLive, number, progressOf } from "../fleet";
import { num, percent, plural, span, usd } from "../format";
import { seenOf } from "../history";
import { useLive, type Live } from "../live";
import { Spark } from "../chart";
import { TideCard } from "../tide";
import { Card, Cmd, Empty, Meter, Skeleton, Stat, State } from "../ui";
import type { Endpoint, Job } from "../types";
import { PageHead } from "./head";

export function Now() {
  const now = useLive();
  return (
    <>
      <PageHead title="Now" />
      <div class="grid">
        <Headline now={now} />
        <TideCard />
        <div class="half">
          <RunningJobs now={now} />
        </div>
        <div class="half">
          <div class="grid">
            <Attention now={now} />
            <Serving now={now} />
          </div>
        </div>
      </div>
    </>
  );
}

function Headline({ now }: { now: Live }) {
  const counted = useRef(new Map<string, Record<string, number>>());
  useEffect(() => {
    for (const endpoint of now.endpoints.values()) if (!counted.current.has(endpoint.id)) counted.current.set(endpoint.id, endpoint.counted);
  });
  if (!now.status || !now.hello) return <Skeleton height={118} />;
  const fleet = fleetOf(now);
  const unit = fleet.unit === "gpus" ? "GPU" : "CPU";
  const busy = fleet.byUse.training + fleet.byUse.serving + fleet.byUse.batch + fleet.byUse.unmanaged;
  const { usd: budget, spent_micro_usd: spent } = budgetsOf(now.teams);
  const jobs = [...now.jobs.values()];
  const serving = [...now.endpoints.values()].reduce((sum, endpoint) => sum + endpoint.tps, 0);
  const training = jobs.filter((job) => job.state === "running").reduce((sum, job) => sum + (number(job.progress.tokens_per_s) ?? 0), 0);
  const burns = [...now.endpoints.values()].map((endpoint) => [endpoint.id, burnOf(endpoint)] as const).filter(([, burn]) => burn != null);
  const worst = burns.sort((a, b) => b[1]! - a[1]!)[0];
  const promised = [...now.endpoints.values()].filter((endpoint) => endpoint.slo_ttft_s != null).length;
  const waiting = jobs.filter((job) => job.state === "queued");
  const next = waiting.filter((job) => job.wait_s != null).sort((a, b) => a.wait_s! - b.wait_s!)[0];
  const firing = [...(now.alerts?.values() ?? [])].filter((alert) => alert.state === "firing");
  return (
    <div class="stats">
      <Stat
        label={`${unit}s in use`}
        href="#/capacity"
        cmd="raytide status"
        value={
          <>
            {num(round(busy))}
            <span class="unit"> of {num(fleet.total)}</span>
          </>
        }
        share={fleet.total ? busy / fleet.total : 0}
        note={`${num(round(fleet.byUse.idle))} idle, ${num(round(fleet.byUse.starting))} starting`}
      />
      <Stat
        label="Spending"
        href="#/cost"
        cmd="raytide cost"
        value={usd(now.status.price_micro_usd_h)}
        unit="/h"
        share={budget ? spent / 1e6 / budget : null}
        tone={budget && spent / 1e6 > 0.95 * budget ? "bad" : budget && spent / 1e6 > 0.8 * budget ? "warn" : undefined}
        note={budget ? `${percent(spent / 1e6 / budget)} of budgets` : `${usd(now.status.cost_micro_usd)} so far`}
        noteTitle={budget ? `${usd(spent)} of $${num(budget)} this month` : "No team has a budget"}
      />
      <Stat
        label="Tokens"
        href="#/endpoints"
        cmd="raytide serve"
        value={num(serving + training)}
        unit="/s"
        note={`${num(serving)} served`}
        noteTitle={`${num(serving)} served, ${num(training)} trained`}
      />
      <Stat
        label="SLO burn"
        href="#/endpoints"
        cmd="raytide serve --json"
        value={worst ? `${num(worst[1])}×` : "–"}
        tone={worst && worst[1]! > 14.4 ? "bad" : worst && worst[1]! > 1 ? "warn" : undefined}
        note={worst ? `highest: ${worst[0]}` : promised ? "no requests yet" : "no endpoint promises a latency"}
      />
      <Stat
        label="Waiting"
        href="#/queue"
        cmd="raytide ps"
        value={num(waiting.length)}
        unit={waiting.length === 1 ? "job" : "jobs"}
        note={next ? `next starts in ${span(next.wait_s)}` : waiting.length ? "no start is forecast" : `${plural(jobs.filter(isLive).length, "job")} run`}
      />
      <Stat
        label="Alerts"
        href="#/alerts"
        cmd="raytide alerts list"
        value={num(firing.length)}
        tone={firing.length ? "bad" : undefined}
        unit="firing"
        note={firing[0]?.name ?? (now.alerts ? "all quiet" : " ")}
      />
    </div>
  );
}

const round = (value: number) => Math.round(value * 10) / 10;

function RunningJobs({ now }: { now: Live }) {
  const jobs = [...now.jobs.values()].filter((job) => isLive(job) && job.state !== "queued").sort((a, b) => b.price_micro_usd_h - a.price_micro_usd_h || a.id.localeCompare(b.id));
  return (
    <Card title="Running jobs" cmd="raytide ps" flush aside={<a href="#/runs">All runs</a>}>
      {!now.status ? (
        <Skeleton height={240} />
      ) : jobs.length === 0 ? (
        <Empty title="No job runs" cmd="raytide train run.yaml">
          Train a model, build a dataset or run a script on the pool.
        </Empty>
      ) : (
        <ul class="list">
          {jobs.slice(0, 8).map((job) => (
            <JobLine key={job.id} job={job} />
          ))}
        </ul>
      )}
    </Card>
  );
}

function JobLine({ job }: { job: Job }) {
  const done = progressOf(job);
  const loss = number(job.progress.loss);
  return (
    <li>
      <div class="grow">
        <a class="strong" href={`#/runs/${job.id}`}>
          {job.name}
        </a>{" "}
        <span class="faint">{job.id}</span>
        <span class="sub-line">
          {job.team} · {job.waiting || `${job.ready} of ${job.wanted} members`}
          {loss != null && ` · loss ${loss.toFixed(3)}`}
        </span>
        {done != null && <Meter share={done} label={`${Math.round(done * 100)} % of its steps`} />}
      </div>
      <div class="end">
        <State of={job.state} />
        <span class="sub-line">{usd(job.price_micro_usd_h)}/h</span>
      </div>
    </li>
  );
}

function Attention({ now }: { now: Live }) {
  const rows: { key: string; href: string; text: string; detail: string; cmd: string }[] = [];
  for (const alert of now.alerts?.values() ?? []) {
    if (alert.state === "firing") rows.push({ key: `alert-${alert.name}-${JSON.stringify(alert.labels)}`, href: "#/alerts", text: alert.name, detail: alert.summary, cmd: "raytide alerts list" });
  }
  for (const [index, error] of (now.status?.errors ?? []).entries()) rows.push({ key: `error-${index}`, href: "#/capacity", text: "Control plane", detail: error, cmd: "raytide status" });
  for (const endpoint of now.endpoints.values()) {
    if (endpoint.state === "failed") rows.push({ key: endpoint.id, href: `#/endpoints/${endpoint.id}`, text: `${endpoint.id} failed`, detail: endpoint.reason, cmd: "raytide serve" });
  }
  for (const node of now.nodes.values()) {
    if (node.lost_at_s != null) rows.push({ key: node.id, href: `#/capacity/${node.id}`, text: `${node.id} is lost`, detail: `${node.type} in ${node.zone}`, cmd: "raytide status" });
  }
  for (const job of now.jobs.values()) {
    if (job.state === "failed") rows.push({ key: job.id, href: `#/runs/${job.id}`, text: `${job.name} failed`, detail: job.reason, cmd: `raytide why ${job.id}` });
  }
  return (
    <Card title="Needs attention" flush cmd="raytide status">
      {!now.status ? (
        <Skeleton height={90} />
      ) : rows.length === 0 ? (
        <p class="quiet" style={{ padding: "4px 16px 16px" }}>
          Nothing: no alert fires, nothing failed in the last 15 minutes.
        </p>
      ) : (
        <ul class="list">
          {rows.slice(0, 6).map((row) => (
            <li key={row.key}>
              <div class="grow">
                <a class="strong bad-text" href={row.href}>
                  {row.text}
                </a>
                <span class="sub-line" title={row.detail}>
                  {row.detail}
                </span>
              </div>
              <Cmd run={row.cmd} />
            </li>
          ))}
        </ul>
      )}
    </Card>
  );
}

function Serving({ now }: { now: Live }) {
  const endpoints = [...now.endpoints.values()].sort((a, b) => b.rps - a.rps || a.id.localeCompare(b.id));
  return (
    <Card title="Endpoints" cmd="raytide serve" flush aside={<a href="#/endpoints">All endpoints</a>}>
      {!now.status ? (
        <Skeleton height={120} />
      ) : endpoints.length === 0 ? (
        <Empty title="Nothing is served" cmd="raytide serve MODEL --name chat">
          Serve a directory, a URL or a registered model.
        </Empty>
      ) : (
        <ul class="list">
          {endpoints.slice(0, 6).map((endpoint) => (
            <EndpointLine key={endpoint.id} endpoint={endpoint} />
          ))}
        </ul>
      )}
    </Card>
  );
}

function EndpointLine({ endpoint }: { endpoint: Endpoint }) {
  const isLate = endpoint.slo_ttft_s != null && endpoint.ttft_s != null && endpoint.ttft_s > endpoint.slo_ttft_s;
  return (
    <li class="middle">
      <div class="grow">
        <a class="strong" href={`#/endpoints/${endpoint.id}`}>
          {endpoint.id}
        </a>
        <span class="sub-line">
          {endpoint.ready} of {plural(endpoint.target, "replica")} · {num(endpoint.rps)}/s
          {endpoint.ttft_s != null && (
            <>
              {" · "}
              <span class={isLate ? "bad-text" : ""}>first token {span(endpoint.ttft_s)}</span>
            </>
          )}
        </span>
      </div>
      <div class="from-medium" style={{ width: "84px" }}>
        <Spark values={seenOf(endpoint.id)?.values.tps.slice(-120) ?? []} color="serving" label={`${num(endpoint.tps)} tokens a second`} />
      </div>
      <State of={endpoint.state} />
    </li>
  );
}

