// The fleet: every node and what each GPU does, now or at an earlier time, and the decisions that made it so.
import { useEffect, useMemo, useState } from "preact/hooks";

import { get } from "../api";
import { fleetOf, USE_NAMES, unitOf, type Unit } from "../fleet";
import { moment, num, percent, plural, span, time, usd, when } from "../format";
import { now as clock, useLive, type Live } from "../live";
import type { Place } from "../routes";
import { Table, useFilter, type Column } from "../table";
import { USES, type NodeRow, type NodeType, type Use } from "../types";
import { Card, Choice, Empty, Pairs, Problem, Skeleton, Stat, State, useLoad, When } from "../ui";
import { PageHead } from "./head";

const DAY = 86_400;
const NO_NODES: NodeRow[] = [];

export function Capacity({ at }: { at: Place }) {
  const now = useLive();
  if (at.rest) return <OneNode id={at.rest} now={now} />;
  return <Fleet now={now} />;
}

function Fleet({ now }: { now: Live }) {
  const [back_s, setBack] = useState(0);
  const [at_s, setAt] = useState(0);
  const [by, setBy] = useState<"zone" | "type" | "team">("zone");
  useEffect(() => {
    const timer = setTimeout(() => setAt(back_s ? Math.round(clock() - back_s) : 0), 200);
    return () => clearTimeout(timer);
  }, [back_s]);
  const earlier = useLoad((signal) => (at_s ? get<{ nodes: NodeRow[] }>("/v1/fleet", { at_s }, signal) : Promise.resolve(null)), [at_s]);
  const nodes = useMemo(() => (at_s ? (earlier.data?.nodes ?? null) : [...now.nodes.values()]), [at_s, earlier.data, now.nodes]);
  const shown = useFilter("Nodes", nodes ?? NO_NODES, (node) => `${node.id} ${node.type} ${node.zone} ${node.market} ${node.state} ${node.held.map((share) => `${share.use} ${share.subject} ${share.team}`).join(" ")}`);
  const fleet = fleetOf(now);
  const unit = fleet.unit === "gpus" ? "GPU" : "CPU";
  const spot = [...now.nodes.values()].filter((node) => node.market === "spot");
  const leaving = [...now.nodes.values()].filter((node) => ["draining", "terminating"].includes(node.state));
  const coming = [...now.nodes.values()].filter((node) => ["requested", "launching"].includes(node.state));
  return (
    <>
      <PageHead title="Capacity" sub={now.status && plural(now.nodes.size, "node")} />
      <div class="grid">
        {!now.status || !now.hello ? (
          <Skeleton height={110} />
        ) : (
          <div class="stats five">
            <Stat label="Nodes" cmd="raytide status" value={num(now.nodes.size)} note={`${num(coming.length)} coming, ${num(leaving.length)} leaving`} />
            <Stat label={`${unit}s`} cmd="raytide status" value={num(fleet.total)} note={`${num(Math.round(fleet.byUse.idle * 10) / 10)} idle`} />
            <Stat label="On spot" cmd="raytide status" value={percent(fleet.total ? fleet.spot / fleet.total : 0)} note={plural(spot.length, "spot node")} />
            <Stat label="Price" cmd="raytide cost --by node" value={usd(now.status.price_micro_usd_h)} unit="/h" note={fleet.total ? `${usd(now.status.price_micro_usd_h / fleet.total)} for each ${unit}` : "nothing is rented"} />
            <Stat label="Zones" cmd="raytide status" value={num(new Set([...now.nodes.values()].map((node) => node.zone)).size)} note={[...new Set([...now.nodes.values()].map((node) => node.zone))].sort().join(", ") || "none in use"} />
          </div>
        )}
        <Card
          title={at_s ? `The fleet at ${time(at_s)}` : "The fleet"}
          cmd="raytide status"
          aside={
            <Choice
              label="Group by"
              value={by}
              onChange={setBy}
              options={[
                ["zone", "Zone"],
                ["type", "Type"],
                ["team", "Team"],
              ]}
            />
          }
        >
          <div class="replay">
            <label class="quiet" for="replay">
              {at_s ? <span title={moment(at_s)}>{time(at_s)}</span> : "now"}
            </label>
            <input id="replay" type="range" min={-DAY} max={0} step={60} value={-back_s} aria-label="Replay: the time that is shown" aria-valuetext={back_s ? `${span(back_s)} ago` : "now"} onInput={(event) => setBack(-Number(event.currentTarget.value))} />
            <button type="button" class="choice" style={{ padding: "2px 10px" }} disabled={!back_s} onClick={() => setBack(0)}>
              {back_s ? `${span(back_s)} ago · back to now` : "drag to replay the last day"}
            </button>
          </div>
          <div style={{ height: "14px" }} />
          {!now.status || !now.hello ? (
            <Skeleton height={260} />
          ) : earlier.error && at_s ? (
            <Problem error={earlier.error} />
          ) : nodes === null ? (
            <Skeleton height={260} />
          ) : nodes.length === 0 ? (
            <Empty title={at_s ? "No node ran at this time" : "No node is rented"} cmd={at_s ? undefined : "raytide autoscaler explain"}>
              {at_s ? "" : "Nodes are bought when work asks for them, and given back when they are idle."}
            </Empty>
          ) : (
            <>
              {shown.field}
              {shown.rows.length === 0 ? <Empty title={`Nothing matches “${shown.typed}”`} /> : <Grid nodes={shown.rows} types={now.hello.types} unit={unitOf(now)} by={by} />}
            </>
          )}
        </Card>
        <Decisions at_s={at_s} plan={now.status?.plan} isAll={now.hello?.team === "*"} />
        <Offerings now={now} />
      </div>
    </>
  );
}

function Grid({ nodes, types, unit, by }: { nodes: NodeRow[]; types: Record<string, NodeType>; unit: Unit; by: "zone" | "type" | "team" }) {
  const groups = new Map<string, NodeRow[]>();
  for (const node of nodes) {
    const key = by === "team" ? (node.held.find((share) => share.team && share.team !== "-")?.team ?? "nobody's") : node[by];
    groups.set(key, [...(groups.get(key) ?? []), node]);
  }
  const used = USES.filter((use) => nodes.some((node) => sharesOf(node).some((share) => share.use === use)));
  const isSmall = nodes.length > 60;
  return (
    <>
      {[...groups].sort(([a], [b]) => a.localeCompare(b)).map(([name, members]) => (
        <div key={name} class="zone">
          <div class="zone-head">
            <b>{name}</b> {plural(members.length, "node")}
          </div>
          <div class={`fleet ${isSmall ? "small" : ""}`}>
            {members.map((node) => (
              <NodeBox key={node.id} node={node} type={types[node.type]} unit={unit} />
            ))}
          </div>
        </div>
      ))}
      <ul class="legend">
        {used.map((use) => (
          <li key={use}>
            <span class="swatch" style={{ background: `var(--${use})` }} />
            {USE_NAMES[use]}
          </li>
        ))}
        <li>dashed: coming or leaving</li>
      </ul>
    </>
  );
}

const MOST_CELLS = 16;

function NodeBox({ node, type, unit }: { node: NodeRow; type: NodeType | undefined; unit: Unit }) {
  const size = Math.max(1, Math.round(type?.[unit] ?? type?.cpus ?? 1));
  const cells = cellsOf(node, Math.min(size, MOST_CELLS));
  const text = node.held.map((share) => `${USE_NAMES[share.use]}${share.subject ? ` (${share.subject})` : ""} ${percent(share.weight)}`).join(", ") || node.state;
  const state = node.lost_at_s ? "gone-dark" : ["draining", "terminating"].includes(node.state) ? "leaving" : ["requested", "launching"].includes(node.state) ? "coming" : "";
  return (
    <a class={`node ${state}`} href={`#/capacity/${node.id}`} title={`${node.id}, ${node.type} in ${node.zone}, ${node.market}, ${node.state}: ${text}`}>
      <div class="top">
        <b class="clip">{node.id}</b>
        <span class="clip">{node.market === "spot" ? "spot" : node.type}</span>
      </div>
      <div class="cells" role="img" aria-label={text} style={{ gridTemplateColumns: `repeat(${Math.min(cells.length, 8)}, minmax(0, 1fr))` }}>
        {cells.map((use, index) => (
          <i key={index} style={{ background: `var(--${use})` }} />
        ))}
      </div>
    </a>
  );
}

/** Who holds a node; one that nobody holds yet is starting. */
const sharesOf = (node: NodeRow) => (node.held.length ? node.held : [{ use: "starting" as Use, weight: 1, subject: "", team: "" }]);

/** One use for each GPU, the largest shares first; parts of one GPU are rounded so that the number of cells is right. */
function cellsOf(node: NodeRow, count: number): Use[] {
  const order = [...sharesOf(node)].sort((a, b) => USES.indexOf(a.use) - USES.indexOf(b.use));
  const cells: Use[] = [];
  let sum = 0;
  for (const share of order) {
    sum += share.weight;
    while (cells.length < Math.min(count, Math.round(sum * count))) cells.push(share.use);
  }
  while (cells.length < count) cells.push("idle");
  return cells;
}

interface PlanRow {
  at_s: number;
  last_at_s: number;
  actions: Action[];
}

interface Action {
  action: string;
  reason?: string;
  remedy?: string;
  cost_micro_usd_h?: number;
  rejected?: { choice: string; reason: string; extra_micro_usd_h: number | null }[];
  [field: string]: unknown;
}

const SUBJECTS: Record<string, string> = { admit: "job_id", requeue: "job_id", preempt: "job_id", shrink: "job_id", grow: "job_id", wait: "subject", assign: "lease_id", unassign: "lease_id", launch: "node_id", scale: "endpoint", drain: "node_id", terminate: "node_id" };
const KINDS: [string, string, string[]][] = [
  ["nodes", "Nodes", ["launch", "drain", "terminate"]],
  ["jobs", "Jobs", ["admit", "requeue", "preempt", "shrink", "grow", "wait", "assign", "unassign"]],
  ["scale", "Replicas", ["scale"]],
];

function detail(action: Action): string {
  switch (action.action) {
    case "launch":
      return `${action.node_type} in ${action.zone} for ${action.subject}`;
    case "scale":
      return `to ${plural(Number(action.replicas), "replica")}`;
    case "assign":
    case "unassign":
      return `member ${action.member} ${action.action === "assign" ? "→" : "←"} ${action.node_id}`;
    case "admit":
      return (action.lease as { shape: string }).shape;
    case "wait":
      return String(action.constraint);
    case "shrink":
    case "grow":
      return plural((action.members as unknown[]).length, "member");
  }
  return "";
}

const MOST_DECISIONS = 60;

function Decisions({ at_s, plan, isAll }: { at_s: number; plan: number | undefined; isAll: boolean }) {
  const [kind, setKind] = useState("");
  const query: Record<string, number> = at_s ? { limit: 20, until_s: at_s } : { limit: 40 };
  const { data, error } = useLoad((signal) => (isAll ? get<PlanRow[]>("/v1/plans", query, signal) : Promise.resolve([])), [at_s, isAll], 0, plan);
  const kinds = KINDS.find(([id]) => id === kind)?.[2];
  const rows = (data ?? [])
    .flatMap((each) => each.actions.map((action) => ({ at_s: each.at_s, action })))
    .reverse()
    .filter(({ action }) => !kinds || kinds.includes(action.action))
    .filter(({ action }, index, all) => action.action !== "wait" || !all.slice(0, index).some((other) => other.action.action === "wait" && other.action.subject === action.subject))
    .slice(0, MOST_DECISIONS);
  return (
    <Card
      title={at_s ? `Decisions until ${time(at_s)}` : "Decisions"}
      cmd={at_s ? `raytide autoscaler explain --at ${time(at_s)}` : "raytide autoscaler explain"}
      flush
      aside={<Choice label="Kind" value={kind} onChange={setKind} options={[["", "All"], ...KINDS.map(([id, title]) => [id, title] as const)]} />}
    >
      {!isAll ? (
        <Empty title="Decisions show the jobs of every team">A token for all teams shows them.</Empty>
      ) : error && !data ? (
        <Problem error={error} />
      ) : !data ? (
        <Skeleton height={160} />
      ) : rows.length === 0 ? (
        <Empty title="Nothing was decided yet">Each launch, drain and admission appears here with its reason and what was rejected.</Empty>
      ) : (
        <ol style={{ maxHeight: "560px", overflow: "auto" }} tabIndex={0} aria-label="Decisions">
          {rows.map(({ at_s: at, action }, index) => (
            <li class="decision" key={`${at}-${index}`}>
              <time class="faint" title={moment(at)}>
                {when(at)}
              </time>
              <span class={`strong ${["terminate", "drain", "preempt", "shrink"].includes(action.action) ? "warn-text" : ""}`}>{action.action}</span>
              <div class="what">
                <span class="strong">{String(action[SUBJECTS[action.action]] ?? "")}</span> <span class="quiet">{detail(action)}</span>
                <p class="why">
                  {action.reason} {action.remedy}
                </p>
                {(action.rejected?.length ?? 0) > 0 && (
                  <ul>
                    {action.rejected!.map((each) => (
                      <li key={each.choice}>
                        not {each.choice}: {each.reason}
                        {each.extra_micro_usd_h != null && ` (${each.extra_micro_usd_h < 0 ? "" : "+"}${usd(each.extra_micro_usd_h)}/h)`}
                      </li>
                    ))}
                  </ul>
                )}
              </div>
              <span class={action.cost_micro_usd_h && action.cost_micro_usd_h > 0 ? "" : "quiet"}>{action.cost_micro_usd_h ? `${action.cost_micro_usd_h > 0 ? "+" : ""}${usd(action.cost_micro_usd_h)}/h` : ""}</span>
            </li>
          ))}
        </ol>
      )}
    </Card>
  );
}

function Offerings({ now }: { now: Live }) {
  const types = Object.entries(now.hello?.types ?? {}).filter(([, type]) => type.max_nodes > 0);
  const counts = new Map<string, number>();
  for (const node of now.nodes.values()) counts.set(node.type, (counts.get(node.type) ?? 0) + 1);
  const shown = useFilter("Node types", types, ([name, type]) => `${name} ${type.market} ${type.accelerator} ${type.zones.join(" ")}`);
  return (
    <Card title="Node types" cmd="raytide status --json" flush>
      {shown.field}
      <div class="scroll" role="group" aria-label="Table" tabIndex={0}>
        <table class="plain">
          <thead>
            <tr>
              <th>Type</th>
              <th>Market</th>
              <th class="end">Nodes</th>
              <th class="end">GPUs</th>
              <th class="end">CPUs</th>
              <th class="end">Price</th>
              <th>Zones</th>
            </tr>
          </thead>
          <tbody>
            {shown.rows.map(([name, type]) => (
              <tr key={name}>
                <td class="strong">{name}</td>
                <td class="keep">{type.market}</td>
                <td class="end">
                  {num(counts.get(name) ?? 0)} <span class="faint">of {num(type.max_nodes)}</span>
                </td>
                <td class="end">{type.gpus ? `${num(type.gpus)} ${type.accelerator}` : "–"}</td>
                <td class="end">{num(type.cpus)}</td>
                <td class="end">{usd(type.price_micro_usd_h)}/h</td>
                <td class="keep">{type.zones.map((zone) => (type.zone_prices[zone] === type.price_micro_usd_h ? zone : `${zone} ${usd(type.zone_prices[zone])}`)).join(", ")}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Card>
  );
}

interface Entry {
  from_us: number;
  to_us: number;
  kind: string;
  subject: string;
  team: string;
  amount_micro_usd: number;
  is_reversal: boolean;
  cause: string;
}

function OneNode({ id, now }: { id: string; now: Live }) {
  const node = now.nodes.get(id);
  const { data } = useLoad((signal) => get<Entry[]>("/v1/ledger", { node: id, limit: 30 }, signal), [id], 20_000);
  return (
    <>
      <PageHead title={id} crumb={["Capacity", "#/capacity"]} sub={node && <State of={node.lost_at_s ? "failed" : node.state} title={node.reason} />} />
      <div class="grid">
        <Card title="Node" cmd="raytide status">
          {!now.status ? (
            <Skeleton height={120} />
          ) : !node ? (
            <Empty title={`${id} is gone`}>The ledger below still has what it cost.</Empty>
          ) : (
            <Pairs
              rows={[
                ["Type", node.type],
                ["Zone", node.zone],
                ["Market", node.market],
                ["Price", `${usd(node.price_micro_usd_h)}/h`],
                ["Requested", <When at={node.requested_at_s} />],
                ["Ready after", node.ready_at_s ? span(node.ready_at_s - node.requested_at_s) : "not yet"],
                ["GPU in use", percent(node.use.gpu)],
                ["CPU in use", percent(node.use.cpu)],
                ["Bought for", node.subject || "–"],
                ["Reason", node.reason || "–"],
                ...(node.drain_deadline_s ? [["Leaves", span(node.drain_deadline_s - clock())] as [string, string]] : []),
              ]}
            />
          )}
        </Card>
        {node && (
          <Card title="Held by" cmd="raytide status --json" flush>
            <ul class="list">
              {node.held.map((share) => (
                <li key={`${share.use}-${share.subject}`}>
                  <span class="swatch" style={{ background: `var(--${share.use})` }} />
                  <span class="grow">
                    {share.subject ? <a href={share.use === "serving" ? `#/endpoints/${share.subject}` : `#/runs/${share.subject}`}>{share.subject}</a> : USE_NAMES[share.use]}{" "}
                    <span class="quiet">{share.team === "-" ? "another team" : share.team}</span>
                  </span>
                  {percent(share.weight)}
                </li>
              ))}
            </ul>
          </Card>
        )}
        <Card title="Ledger" cmd="raytide cost --by node" flush>
          {!data ? <Skeleton height={120} /> : data.length === 0 ? <Empty title="Nothing is booked yet" /> : <Ledger entries={data} />}
        </Card>
      </div>
    </>
  );
}

type LedgerRow = Entry & { node_id?: string };

export function Ledger({ entries, withNode = false }: { entries: LedgerRow[]; withNode?: boolean }) {
  const columns: Column<LedgerRow>[] = [
    { key: "from", title: "From", width: "minmax(84px, 0.7fr)", sort: (entry) => entry.from_us, cell: (entry) => <span title={moment(entry.from_us / 1e6)}>{when(entry.from_us / 1e6)}</span> },
    { key: "for", title: "For", width: "60px", end: true, from: "medium", sort: (entry) => entry.to_us - entry.from_us, cell: (entry) => span((entry.to_us - entry.from_us) / 1e6) },
    {
      key: "kind",
      title: "Kind",
      width: "minmax(64px, 1fr)",
      sort: (entry) => entry.kind,
      cell: (entry) => (
        <>
          {entry.kind} {entry.is_reversal && <span class="chip">reversal</span>}
          {entry.cause && <span class="sub-line">lost to {entry.cause}</span>}
        </>
      ),
    },
    {
      key: "whose",
      title: withNode ? "Node" : "Whose",
      width: "minmax(72px, 1fr)",
      sort: (entry) => (withNode ? (entry.node_id ?? "") : entry.subject),
      cell: (entry) => (withNode ? <a href={`#/capacity/${entry.node_id}`}>{entry.node_id}</a> : entry.subject || "–"),
    },
    { key: "team", title: "Team", width: "minmax(72px, 0.8fr)", from: "medium", sort: (entry) => entry.team, cell: (entry) => entry.team || "–" },
    { key: "amount", title: "Amount", width: "76px", end: true, sort: (entry) => entry.amount_micro_usd, cell: (entry) => <span title={`${entry.amount_micro_usd} micro-dollars`}>{usd(entry.amount_micro_usd)}</span> },
  ];
  const id = (entry: LedgerRow) => `${entry.from_us}-${entry.kind}-${entry.subject}-${entry.node_id}-${entry.cause}-${entry.is_reversal}`;
  return <Table label="Ledger" columns={columns} rows={entries} id={id} search={(entry) => `${entry.kind} ${entry.cause} ${entry.subject} ${entry.team} ${entry.node_id ?? ""}`} height={560} />;
}
