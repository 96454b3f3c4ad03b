// Jobs and their curves: loss, throughput, where a step's time goes, restarts and resizes; and runs beside each other.
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { get } from "../api";
import { Chart, Legend, type Mark, type Series } from "../chart";
import { isLive, number, progressOf } from "../fleet";
import { moment, num, percent, plural, span, usd, when } from "../format";
import { useLive } from "../live";
import type { Place } from "../routes";
import { Table, type Column } from "../table";
import type { Job } from "../types";
import { Card, Choice, Cmd, Empty, Meter, Pairs, Problem, Skeleton, Stat, State, useLoad, When } from "../ui";
import { PageHead } from "./head";

export interface CurvesData {
  steps: number[];
  at_s: (number | null)[];
  values: Record<string, (number | null)[]>;
  events: { at_s: number; event: string; step?: number; [field: string]: unknown }[];
  every: number;
}

const MOST_COMPARED = 5;
const COLORS = ["training", "unmanaged", "serving", "batch", "lost"];

export function Runs({ at }: { at: Place }) {
  const compared = at.query.get("compare");
  if (compared) return <Compare ids={compared.split(",").slice(0, MOST_COMPARED)} />;
  return at.rest ? <OneRun id={at.rest} key={at.rest} /> : <AllRuns />;
}

interface JobView {
  job: { id: string; spec: { kind: string; name: string; team: string; priority: string; gang: { shapes: { members: number; resources: Record<string, number> }[] } }; user: string; state: string; reason: string; submitted_at_s: number; admitted_at_s: number | null; started_at_s: number | null; ended_at_s: number | null; restarts: number; preemptions: number; stop_requested: boolean; progress: Record<string, number | string> };
  position: number | null;
  cost_micro_usd: number;
  price_micro_usd_h: number;
}

/** A job of GET /v1/jobs as a row of the stream, for those that ended long ago. */
function asRow({ job, cost_micro_usd, price_micro_usd_h, position }: JobView): Job {
  const shape = job.spec.gang.shapes[0];
  return {
    ...job,
    ...{ name: job.spec.name, kind: job.spec.kind, team: job.spec.team, priority: job.spec.priority, use: job.spec.kind === "train" ? "training" : "batch" },
    ...{ gang: "", wanted: shape.members, gpus: (shape.resources.GPU ?? 0) * shape.members, cpus: (shape.resources.CPU ?? 0) * shape.members },
    ...{ ready: 0, members: 0, on: [], due_at_s: null, position, constraint: "", waiting: "", remedy: "", wait_s: null, stance: "", data: "", cost_micro_usd, price_micro_usd_h },
  };
}

const FILTERS = [
  ["", "All"],
  ["live", "Unfinished"],
  ["train", "Training"],
  ["ended", "Ended"],
] as const;
const PAGE = 200;

function AllRuns() {
  const now = useLive();
  const [which, setWhich] = useState<"" | "live" | "train" | "ended">("");
  const [pages, setPages] = useState(1);
  const [chosen, setChosen] = useState<string[]>([]);
  // Again and again: a job leaves the live rows a quarter of an hour after its end, and must not be shown as it once was.
  const older = useLoad((signal) => get<JobView[]>("/v1/jobs", { limit: Math.min(1000, PAGE * pages) }, signal), [pages], 60_000);
  const all = useMemo(() => {
    const found = new Map((older.data ?? []).map((view) => [view.job.id, asRow(view)]));
    for (const [id, job] of now.jobs) found.set(id, job);
    return [...found.values()].sort((a, b) => b.submitted_at_s - a.submitted_at_s || numberOf(b.id) - numberOf(a.id));
  }, [older.data, now.jobs]);
  const rows = useMemo(() => all.filter((job) => !which || (which === "live" ? isLive(job) : which === "ended" ? !isLive(job) : job.kind === "train")), [all, which]);
  const choose = (id: string, isChosen: boolean) => setChosen((before) => (isChosen ? [...before, id].slice(-MOST_COMPARED) : before.filter((each) => each !== id)));
  const columns: Column<Job>[] = [
    {
      key: "choose",
      title: "",
      width: "20px",
      from: "medium",
      cell: (job) => (job.kind === "train" ? <input type="checkbox" aria-label={`Compare ${job.id}`} checked={chosen.includes(job.id)} onChange={(event) => choose(job.id, event.currentTarget.checked)} /> : ""),
    },
    {
      key: "name",
      title: "Job",
      width: "minmax(100px, 1.5fr)",
      sort: (job) => job.name,
      cell: (job) => (
        <>
          <a class="strong" href={`#/runs/${job.id}`}>
            {job.name}
          </a>
          <span class="sub-line">
            {job.id} · {job.kind}
          </span>
        </>
      ),
    },
    { key: "state", title: "State", width: "84px", sort: (job) => job.state, cell: (job) => <State of={job.stop_requested && isLive(job) ? "stopping" : job.state} title={job.reason || job.waiting} /> },
    {
      key: "progress",
      title: "Progress",
      width: "minmax(72px, 1fr)",
      sort: (job) => progressOf(job),
      cell: (job) => {
        const done = progressOf(job);
        if (done == null) return <span class="faint">{job.state === "queued" ? (job.wait_s == null ? "waits" : `in ${span(job.wait_s)}`) : "–"}</span>;
        return (
          <>
            {percent(done)} <span class="faint wide-only">of {num(number(job.progress.steps))}</span>
            <Meter share={done} label={`${percent(done)} done`} />
          </>
        );
      },
    },
    { key: "loss", title: "Loss", width: "64px", end: true, from: "wide", sort: (job) => number(job.progress.loss), cell: (job) => number(job.progress.loss)?.toFixed(3) ?? "–" },
    { key: "speed", title: "Tokens/s", width: "72px", end: true, from: "wide", sort: (job) => number(job.progress.tokens_per_s), cell: (job) => num(number(job.progress.tokens_per_s)) },
    { key: "gpus", title: "GPUs", width: "52px", end: true, from: "wide", sort: (job) => job.gpus, cell: (job) => (job.gpus ? num(job.gpus) : <span class="faint">–</span>) },
    { key: "team", title: "Team", width: "minmax(70px, 0.6fr)", from: "medium", sort: (job) => job.team, cell: (job) => <>{job.team}<span class="sub-line">{job.user}</span></> },
    { key: "cost", title: "Cost", width: "76px", end: true, from: "medium", sort: (job) => job.cost_micro_usd, cell: (job) => usd(job.cost_micro_usd) },
    { key: "since", title: "Submitted", width: "92px", end: true, from: "medium", sort: (job) => job.submitted_at_s, cell: (job) => <When at={job.submitted_at_s} /> },
  ];
  const total = Object.values(now.status?.jobs ?? {}).reduce((sum, count) => sum + count, 0);
  return (
    <>
      <PageHead title="Runs" sub={now.status && plural(total, "job")}>
        {chosen.length > 0 && (
          <a class="chip accent" href={`#/runs?compare=${chosen.join(",")}`}>
            Compare {plural(chosen.length, "run")}
          </a>
        )}
      </PageHead>
      <Card
        title="Jobs"
        cmd="raytide ps"
        flush
        aside={<Choice label="Which" value={which} onChange={setWhich} options={FILTERS} />}
      >
        {!now.status ? (
          <Skeleton height={400} />
        ) : all.length === 0 ? (
          <Empty title="No job was submitted yet" cmd="raytide train run.yaml">
            Train a model, build a dataset, or run a script on every node of a gang.
          </Empty>
        ) : rows.length === 0 ? (
          <Empty title="No job matches">Change the filter to see others.</Empty>
        ) : (
          <>
            <Table label="Jobs" columns={columns} rows={rows} id={(job) => job.id} href={(job) => `#/runs/${job.id}`} height={720} search={(job) => `${job.id} ${job.name} ${job.team} ${job.user} ${job.kind} ${job.state}`} />
            {total > all.length && PAGE * pages < 1000 && (
              <p style={{ padding: "10px 16px" }}>
                <button type="button" class="button plain" onClick={() => setPages(pages + 1)}>
                  Load older jobs
                </button>{" "}
                <span class="faint">
                  {num(all.length)} of {num(total)} are shown
                </span>
              </p>
            )}
          </>
        )}
      </Card>
    </>
  );
}

const numberOf = (id: string) => Number(id.split("-").at(-1));

function useCurves(id: string, every_ms: number) {
  return useLoad((signal) => get<CurvesData>(`/v1/jobs/${id}/metrics`, { points: 800 }, signal), [id], every_ms);
}

function OneRun({ id }: { id: string }) {
  const now = useLive();
  const isInStream = now.jobs.has(id); // until a quarter of an hour after its end
  const lone = useLoad((signal) => (isInStream ? Promise.resolve(null) : get<JobView>(`/v1/jobs/${id}`, {}, signal)), [id, isInStream]);
  const job = now.jobs.get(id) ?? (lone.data ? asRow(lone.data) : undefined);
  if (!job)
    return (
      <>
        <PageHead title={id} crumb={["Runs", "#/runs"]} />
        {lone.error ? (
          <Card title="No such job">
            <Problem error={lone.error} />
          </Card>
        ) : (
          <Skeleton height={300} />
        )}
      </>
    );
  const done = progressOf(job);
  const left = number(job.progress.left_s);
  const text = job.waiting || job.reason;
  return (
    <>
      <PageHead title={job.name} crumb={["Runs", "#/runs"]} sub={<>{job.id} <State of={job.state} /></>} />
      {text && <div class={`notice ${job.state === "failed" ? "bad" : ""}`}>{text} {job.remedy} <Cmd run={`raytide why ${job.id}`} /></div>}
      <div class="grid">
        <div class="stats five">
          <Stat label="Progress" cmd={`raytide metrics ${id}`} value={done == null ? "–" : percent(done)} share={done} note={done == null ? "it reports no steps" : `step ${num(number(job.progress.step))} of ${num(number(job.progress.steps))}`} />
          <Stat label="Loss" cmd={`raytide metrics ${id}`} value={number(job.progress.loss)?.toFixed(3) ?? "–"} note={left != null ? `${span(left)} left` : "as last reported"} />
          <Stat label="Throughput" cmd={`raytide metrics ${id}`} value={num(number(job.progress.tokens_per_s))} unit="tokens/s" note={number(job.progress.mfu) != null ? `${percent(number(job.progress.mfu), 1)} MFU` : "of the whole gang"} />
          <Stat label="Members" cmd="raytide ps" value={num(job.ready)} unit={`of ${num(job.wanted)}`} note={`${plural(job.restarts, "restart")}, ${plural(job.preemptions, "preemption")}`} />
          <Stat label="Cost" cmd="raytide cost --by job" href={`#/cost/${id}`} value={usd(job.cost_micro_usd)} note={`${usd(job.price_micro_usd_h)}/h now`} />
        </div>
        {job.kind === "train" && <RunCurves id={id} job={job} />}
        <div class="half">
          <Card title="Job" cmd={`raytide why ${id}`}>
            <Pairs
              rows={[
                ["Kind", job.kind],
                ["Team", job.team],
                ["User", job.user],
                ["Priority", job.priority],
                ["Gang", job.gang || plural(job.wanted, "member")],
                ["Submitted", <When at={job.submitted_at_s} />],
                ["Waited", job.started_at_s ? span(job.started_at_s - job.submitted_at_s) : "–"],
                ["Ran", job.started_at_s ? span((job.ended_at_s ?? Date.now() / 1000 + now.ahead_s) - job.started_at_s) : "–"],
                ["Due", job.due_at_s ? moment(job.due_at_s) : "no deadline"],
                ["Nodes", job.on.length ? job.on.map((node, index) => <>{index > 0 && ", "}<a class="link" href={`#/capacity/${node}`}>{node}</a></>) : "–"],
              ]}
            />
          </Card>
        </div>
        <div class="half">
          <Logs id={id} kind={job.kind} isOver={!isLive(job)} />
        </div>
      </div>
    </>
  );
}

const MARKED: Record<string, string> = { resize: "unmanaged", restart: "lost", recovered: "serving", not_applied: "warn", not_saved: "warn" };

function RunCurves({ id, job }: { id: string; job: Job }) {
  const { data, error } = useCurves(id, isLive(job) ? 5000 : 0);
  const [log, setLog] = useState<"" | "log">("");
  const marks = useMemo(() => marksOf(data), [data]);
  if (error && !data)
    return (
      <Card title="Loss">
        <Problem error={error} />
      </Card>
    );
  if (!data) return <Skeleton height={320} />;
  if (data.steps.length === 0)
    return (
      <Card title="Loss" cmd={`raytide metrics ${id}`}>
        <Empty title="No step is logged yet">The curves begin with the first step.</Empty>
      </Card>
    );
  const values = (name: string) => data.values[name] ?? [];
  const phases: Series[] = Object.keys(data.values)
    .filter((name) => name.startsWith("times/"))
    .sort((a, b) => mean(values(a)) - mean(values(b)))
    .map((name, index) => ({ label: name.slice(6), color: PHASE_COLORS[index % PHASE_COLORS.length], values: values(name) }));
  const one = (label: string, name: string, color: string): Series[] => [{ label, color, values: values(name) }];
  return (
    <>
      <Card
        title="Loss"
        cmd={`raytide plot ${id} -o run.html`}
        aside={
          <>
            {marks.length > 0 && <span>{plural(marks.length, "event")} marked</span>}
            <Choice label="Scale" value={log} onChange={setLog} options={[["", "Linear"], ["log", "Log"]]} />
          </>
        }
      >
        <Chart label={`Loss of ${job.name}`} x={data.steps} series={one("loss", "loss", "training")} height={250} steps log={log === "log"} marks={marks} axis={num} format={(value) => value?.toFixed(3) ?? "–"} />
      </Card>
      <div class="half">
        <Card title="Throughput" cmd={`raytide metrics ${id}`} aside="tokens a second">
          <Chart label={`Tokens a second of ${job.name}`} x={data.steps} series={one("tokens/s", "tokens_per_s", "serving")} height={180} steps marks={marks} />
        </Card>
      </div>
      <div class="half">
        <Card title="Where a step's time goes" cmd={`raytide metrics ${id} --json`} aside={<Legend series={[...phases].reverse()} />}>
          {phases.length === 0 ? (
            <Empty title="The run logs no phases" />
          ) : (
            <Chart
              label={`Seconds of a step of ${job.name} by phase`}
              x={data.steps}
              series={phases}
              height={180}
              steps
              stacked
              format={span}
            />
          )}
        </Card>
      </div>
      <div class="half">
        <Card title="Learning rate" cmd={`raytide metrics ${id}`}>
          <Chart label={`Learning rate of ${job.name}`} x={data.steps} series={one("learning rate", "lr", "batch")} height={150} steps format={(value) => (value == null ? "–" : value === 0 ? "0" : value.toExponential(1))} />
        </Card>
      </div>
      <div class="half">
        <Card title="Gradient norm" cmd={`raytide metrics ${id}`}>
          <Chart label={`Gradient norm of ${job.name}`} x={data.steps} series={one("gradient norm", "grad_norm", "unmanaged")} height={150} steps />
        </Card>
      </div>
      {data.events.length > 0 && (
        <Card title="Events" cmd={`raytide plot ${id} -o run.html`} flush>
          <ul class="list" style={{ maxHeight: "260px", overflow: "auto" }} tabIndex={0} aria-label="Events">
            {[...data.events].reverse().map((event, index) => (
              <li key={index}>
                <time class="faint" title={moment(event.at_s)}>
                  {when(event.at_s)}
                </time>
                <span class="strong">{event.event.replaceAll("_", " ")}</span>
                <span class="grow quiet">{eventText(event)}</span>
              </li>
            ))}
          </ul>
        </Card>
      )}
    </>
  );
}

const PHASE_COLORS = ["idle", "unmanaged", "batch", "serving", "training", "lost", "starting"];

const mean = (values: (number | null)[]) => values.reduce((sum: number, value) => sum + (value ?? 0), 0) / Math.max(1, values.length);

/** Why it happened, then its other fields by name. */
const eventText = ({ at_s, event, why, ...fields }: CurvesData["events"][number]) =>
  [
    ...(typeof why === "string" && why ? [why] : []),
    ...Object.entries(fields)
      .filter(([, value]) => typeof value === "number" || (typeof value === "string" && value !== ""))
      .map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? num(value) : value}`),
  ].join(" · ");

/** The events at their steps; those that name none at the step that was logged next. */
function marksOf(data: CurvesData | null): Mark[] {
  if (!data) return [];
  return data.events
    .filter((event) => event.event in MARKED)
    .map((event) => {
      const index = data.at_s.findIndex((at) => at != null && at >= event.at_s);
      const at = typeof event.step === "number" ? event.step : data.steps[index === -1 ? data.steps.length - 1 : index];
      return { at, label: `${event.event.replaceAll("_", " ")}: ${eventText(event)}`, color: MARKED[event.event] };
    });
}

function Logs({ id, kind, isOver }: { id: string; kind: string; isOver: boolean }) {
  const { data, error } = useLoad((signal) => (kind === "gang" ? Promise.resolve(null) : get<{ text: string }>(`/v1/jobs/${id}/logs`, { tail: 60 }, signal)), [id], isOver ? 0 : 5000);
  const box = useRef<HTMLPreElement>(null);
  const isAtEnd = useRef(true);
  useLayoutEffect(() => {
    if (box.current && isAtEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [data?.text]);
  return (
    <Card title="Log" cmd={`raytide logs ${id} -f`} aside="the last 60 lines">
      {kind === "gang" ? (
        <Empty title="Its driver logs where it was started" />
      ) : error && !data ? (
        <Problem error={error} />
      ) : !data ? (
        <Skeleton height={140} />
      ) : data.text ? (
        <pre
          ref={box}
          style={{ margin: 0, maxHeight: "300px", overflow: "auto" }}
          tabIndex={0}
          aria-label="Log"
          onScroll={({ currentTarget: { scrollTop, scrollHeight, clientHeight } }) => (isAtEnd.current = scrollHeight - scrollTop - clientHeight < 24)}
        >
          {data.text}
        </pre>
      ) : (
        <Empty title="Nothing was printed yet" />
      )}
    </Card>
  );
}

const COMPARED = [
  ["loss", "Loss"],
  ["tokens_per_s", "Tokens/s"],
  ["grad_norm", "Gradient norm"],
  ["mfu", "MFU"],
] as const;

function Compare({ ids }: { ids: string[] }) {
  const now = useLive();
  const [name, setName] = useState<string>("loss");
  const { data, error } = useLoad((signal) => Promise.all(ids.map((id) => get<CurvesData>(`/v1/jobs/${id}/metrics`, { points: 500 }, signal))), [ids.join(",")], 10_000);
  const drawn = useMemo(() => {
    if (!data) return null;
    const x = [...new Set(data.flatMap((curves) => curves.steps))].sort((a, b) => a - b);
    const series = data.map((curves, index) => {
      const at = new Map(curves.steps.map((step, place) => [step, curves.values[name]?.[place] ?? null]));
      return { label: now.jobs.get(ids[index])?.name ?? ids[index], color: COLORS[index], values: x.map((step) => at.get(step) ?? null) };
    });
    return { x, series };
  }, [data, name]);
  return (
    <>
      <PageHead title={`Compare ${plural(ids.length, "run")}`} crumb={["Runs", "#/runs"]} />
      <div class="grid">
        <Card title="Over steps" cmd={`raytide plot ${ids[0]} -o run.html`} aside={<Choice label="Value" value={name} onChange={setName} options={COMPARED} />}>
          {error && !data ? (
            <Problem error={error} />
          ) : !drawn ? (
            <Skeleton height={360} />
          ) : (
            <>
              <Chart label={`${name} of ${ids.join(", ")}`} x={drawn.x} series={drawn.series} height={360} steps axis={num} format={name === "loss" ? (value) => value?.toFixed(3) ?? "–" : num} />
              <ul class="legend">
                {drawn.series.map((series, index) => (
                  <li key={ids[index]}>
                    <span class="swatch" style={{ background: `var(--${series.color})` }} />
                    <a href={`#/runs/${ids[index]}`}>{series.label}</a> <b>{num(series.values.findLast((value) => value != null) ?? null)}</b>
                  </li>
                ))}
              </ul>
            </>
          )}
        </Card>
      </div>
    </>
  );
}
