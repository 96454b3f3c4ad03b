// Who waits, in which place, why and for how long; and how the teams share the fleet.
import { useMemo, useState } from "preact/hooks";

import { budgetOf, spentOf } from "../fleet";
import { num, percent, plural, span, usd } from "../format";
import { now as clock, useLive } from "../live";
import type { Place } from "../routes";
import { Table, useFilter, type Column } from "../table";
import type { Job, Team } from "../types";
import { Card, Choice, Cmd, Empty, Meter, Skeleton, Stat, When } from "../ui";
import { PageHead } from "./head";

const COLUMNS: Column<Job>[] = [
  { key: "position", title: "#", width: "36px", end: true, sort: (j) => j.position ?? 1e9, cell: (j) => <span class="strong">{j.position ?? "–"}</span> },
  {
    key: "name",
    title: "Job",
    width: "minmax(120px, 1fr)",
    sort: (j) => j.name,
    cell: (j) => (
      <>
        <a class="strong" href={`#/runs/${j.id}`}>
          {j.name}
        </a>
        <span class="sub-line">
          {j.id} · {j.team}
        </span>
      </>
    ),
  },
  {
    key: "why",
    title: "Why it waits",
    width: "minmax(0, 2.2fr)",
    from: "medium",
    sort: (j) => j.constraint,
    cell: (j) => (
      <>
        <span class="clip" title={j.waiting}>
          {j.constraint && <span class="chip">{j.constraint}</span>} {j.waiting || "not looked at yet"}
        </span>
        <span class="sub-line" title={[j.remedy, j.data && `Data: ${j.data}`].filter(Boolean).join(" ")}>
          {j.remedy || j.stance} {j.data && `Data: ${j.data}`}
        </span>
      </>
    ),
  },
  { key: "start", title: "Starts in", width: "84px", end: true, sort: (j) => j.wait_s, cell: (j) => (j.wait_s == null ? <span class="faint">unknown</span> : span(j.wait_s)) },
  { key: "gang", title: "Asks for", width: "minmax(90px, 0.8fr)", from: "wide", sort: (j) => j.gpus || j.cpus / 100, cell: (j) => <span title={j.gang}>{j.gpus ? plural(j.gpus, "GPU") : plural(j.cpus, "CPU")}<span class="sub-line">{plural(j.wanted, "member")}</span></span> },
  { key: "priority", title: "Priority", width: "68px", from: "wide", sort: (j) => j.priority, cell: (j) => j.priority },
  { key: "since", title: "Submitted", width: "92px", end: true, from: "medium", sort: (j) => j.submitted_at_s, cell: (j) => <When at={j.submitted_at_s} /> },
  { key: "cmd", title: "", width: "28px", from: "medium", cell: (j) => <Cmd run={`raytide why ${j.id}`} /> },
];

export function Queue(_: { at: Place }) {
  const now = useLive();
  const [which, setWhich] = useState("");
  const waiting = useMemo(() => [...now.jobs.values()].filter((j) => j.state === "queued").sort((a, b) => (a.position ?? 1e9) - (b.position ?? 1e9)), [now.jobs]);
  const reasons = useMemo(() => {
    const counts = new Map<string, number>();
    for (const job of waiting) counts.set(job.constraint || "new", (counts.get(job.constraint || "new") ?? 0) + 1);
    return [...counts].sort((a, b) => b[1] - a[1]);
  }, [waiting]);
  const rows = which ? waiting.filter((job) => (job.constraint || "new") === which) : waiting;
  const known = waiting.filter((job) => job.wait_s != null);
  const oldest = waiting.reduce((least, job) => Math.min(least, job.submitted_at_s), Infinity);
  return (
    <>
      <PageHead title="Queue" sub={now.status && plural(waiting.length, "job")} />
      <div class="grid">
        {!now.status ? (
          <Skeleton height={110} />
        ) : (
          <div class="stats four">
            <Stat label="Waiting" cmd="raytide ps --active" value={num(waiting.length)} unit={waiting.length === 1 ? "job" : "jobs"} note={`${num(waiting.reduce((sum, job) => sum + job.gpus, 0))} GPUs asked for`} />
            <Stat label="Next start" cmd="raytide ps --active" value={known.length ? span(Math.min(...known.map((job) => job.wait_s!))) : "–"} note={known.length ? `${num(known.length)} starts are forecast` : "no start is forecast"} />
            <Stat label="Longest wait" cmd="raytide ps --active" value={waiting.length ? span(clock() - oldest) : "–"} note="since its submission" />
            <Stat label="Most wait for" cmd={waiting[0] ? `raytide why ${waiting[0].id}` : "raytide ps"} value={reasons[0]?.[0] ?? "–"} note={reasons[0] ? plural(reasons[0][1], "job") : "nothing"} />
          </div>
        )}
        <FairShares teams={[...now.teams.values()]} isKnown={now.status !== null} />
        <Card
          title="Waiting jobs"
          cmd="raytide ps --active"
          flush
          aside={
            reasons.length > 1 && (
              <Choice label="Reason" value={which} onChange={setWhich} options={[["", "All"], ...reasons.slice(0, 4).map(([reason, count]) => [reason, `${reason} ${num(count)}`] as const)]} />
            )
          }
        >
          {!now.status ? (
            <Skeleton height={240} />
          ) : waiting.length === 0 ? (
            <Empty title="Nobody waits" cmd="raytide run --gpus 8 train.py">
              Jobs that do not fit yet line up here, each with its reason and the time at which it should start.
            </Empty>
          ) : (
            <Table label="Waiting jobs" columns={COLUMNS} rows={rows} id={(j) => j.id} href={(j) => `#/runs/${j.id}`} height={640} search={(j) => `${j.id} ${j.name} ${j.team} ${j.user} ${j.waiting} ${j.gang} ${j.priority}`} />
          )}
        </Card>
      </div>
    </>
  );
}

const MAIN = ["GPU", "CPU"];

/** Used, own and borrowed amounts of each team, of the first resource that anybody has a quota of. */
function FairShares({ teams, isKnown }: { teams: Team[]; isKnown: boolean }) {
  const resources = [...new Set(teams.flatMap((team) => [...Object.keys(team.own), ...Object.keys(team.quota), ...Object.keys(team.used)]))];
  const resource = MAIN.find((name) => resources.includes(name)) ?? resources[0];
  const rows = teams
    .map((team) => ({ team, used: team.used[resource] ?? 0, own: team.own[resource] ?? team.quota[resource] ?? 0 }))
    .sort((a, b) => b.used - a.used || a.team.team.localeCompare(b.team.team));
  const shown = useFilter("Teams", rows, ({ team }) => team.team);
  const spent = spentOf(teams);
  const most = Math.max(1, ...rows.map((row) => Math.max(row.used, row.own)));
  return (
    <Card title={resource ? `Fair shares of ${resource}s` : "Fair shares"} cmd="raytide quota" flush aside="used, of its own quota, and borrowed beyond it">
      {!isKnown ? (
        <Skeleton height={120} />
      ) : teams.length === 0 ? (
        <Empty title="No teams are known yet" cmd="raytide quota" />
      ) : (
        <>
          {shown.field}
        <div class="scroll" role="group" aria-label="Table" tabIndex={0}>
          <table class="plain">
            <thead>
              <tr>
                <th>Team</th>
                <th style={{ width: "46%" }}>Use</th>
                <th class="end">Quota</th>
                <th class="end from-medium">Weight</th>
                <th class="end from-medium">Recent GPU-hours</th>
                <th class="end">This month</th>
              </tr>
            </thead>
            <tbody>
              {shown.rows.map(({ team, used, own }) => {
                const borrowed = own ? Math.max(0, used - own) : 0;
                const budget = budgetOf(team);
                const share = budget == null ? 0 : spent.get(team.team)! / 1e6 / budget;
                return (
                  <tr key={team.team}>
                    <td class="strong">{team.team}</td>
                    <td>
                      <div class="share-bar" role="img" aria-label={`${num(used)} used of ${num(own)}, ${num(borrowed)} borrowed`}>
                        <span style={{ width: `${((used - borrowed) / most) * 100}%`, background: "var(--training)" }} />
                        <span style={{ width: `${(borrowed / most) * 100}%`, background: "var(--unmanaged)" }} />
                        {own > used && <span style={{ width: `${((own - used) / most) * 100}%`, background: "var(--idle)" }} />}
                      </div>
                      <span class="sub-line">
                        {num(used)} used{borrowed > 0 && `, ${num(borrowed)} of it borrowed`}
                        {own > used && `, ${num(own - used)} left`}
                      </span>
                    </td>
                    <td class="end">{own ? num(own) : "none"}</td>
                    <td class="end from-medium">{num(team.weight)}</td>
                    <td class="end from-medium">{num(team.recent_gpu_h)}</td>
                    <td class="end">
                      {usd(team.spent_micro_usd)}
                      {budget != null && (
                        <>
                          <span class="sub-line">
                            {percent(share)} of ${num(budget)}
                          </span>
                          <Meter share={share} label={`${percent(share)} of the budget`} />
                        </>
                      )}
                    </td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </div>
        </>
      )}
    </Card>
  );
}
