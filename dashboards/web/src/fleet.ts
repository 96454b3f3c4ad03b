// Sums over the fleet that several pages show.
import type { Live } from "./live";
import { USES, type Endpoint, type Job, type NodeRow, type NodeType, type Team, type Use } from "./types";

export const USE_NAMES: Record<Use, string> = {
  training: "Training",
  serving: "Serving",
  batch: "Batch",
  unmanaged: "Unmanaged",
  starting: "Starting",
  idle: "Idle",
  lost: "Lost work",
};

export type Unit = "gpus" | "cpus";

/** GPUs where the fleet runs any, else CPUs: a fleet without GPUs is not an empty one. */
export function unitOf(now: Live): Unit {
  const has = (unit: Unit) => [...now.nodes.values()].some((node) => (now.hello?.types[node.type]?.[unit] ?? 0) > 0);
  if (has("gpus")) return "gpus";
  if (has("cpus")) return "cpus";
  return Object.values(now.hello?.types ?? {}).some((type) => type.gpus > 0) ? "gpus" : "cpus";
}

export interface Fleet {
  unit: Unit;
  total: number;
  ready: number;
  byUse: Record<Use, number>;
  spot: number;
}

export function fleetOf(now: Live): Fleet {
  const unit = unitOf(now);
  const byUse = Object.fromEntries(USES.map((use) => [use, 0])) as Record<Use, number>;
  let total = 0;
  let ready = 0;
  let spot = 0;
  for (const node of now.nodes.values()) {
    const size = now.hello?.types[node.type]?.[unit] ?? 0;
    total += size;
    if (node.market === "spot") spot += size;
    if (node.state === "ready" || node.state === "draining") ready += size;
    const held = node.held.length ? node.held : [{ use: "starting" as Use, weight: 1 }];
    for (const share of held) byUse[share.use] += share.weight * size;
  }
  return { unit, total, ready, byUse, spot };
}

export const sizeOf = (node: NodeRow, types: Record<string, NodeType>, unit: Unit) => types[node.type]?.[unit] ?? 0;

export const isLive = (job: Job) => !["succeeded", "failed", "stopped"].includes(job.state);

/** The speed at which an endpoint uses up what its promise allows: 1 is exactly as much as it may. */
export function burnOf(endpoint: Endpoint, before?: Record<string, number>): number | null {
  if (endpoint.slo_ttft_s == null) return null;
  const finished = (endpoint.counted.finished ?? 0) - (before?.finished ?? 0);
  const late = (endpoint.counted.late ?? 0) - (before?.late ?? 0);
  if (finished + late <= 0) return null;
  return Math.max(0, late) / Math.max(finished, late, 1) / (1 - (endpoint.slo_target ?? 0.99));
}

export const budgetOf = (team: Team): number | null => team.hard_usd ?? team.soft_usd;

/** Sums this month's spending of each team and the teams below it, for which its budget pays. */
export function spentOf(teams: Team[]): Map<string, number> {
  const known = new Map(teams.map((team) => [team.team, team]));
  const sums = new Map<string, number>();
  for (const team of teams)
    for (let at: Team | undefined = team; at; at = known.get(at.parent)) sums.set(at.team, (sums.get(at.team) ?? 0) + team.spent_micro_usd);
  return sums;
}

/** This month's budgets, and what was spent of them. A team's budget also pays for the teams below it, whose own are parts of it; what teams without one spend is no part. */
export function budgetsOf(teams: Map<string, Team>): { usd: number; spent_micro_usd: number } {
  const sums = { usd: 0, spent_micro_usd: 0 };
  for (const team of teams.values()) {
    let payer: Team | null = null; // the highest one with a budget
    for (let at: Team | undefined = team; at; at = teams.get(at.parent)) if (budgetOf(at) != null) payer = at;
    if (!payer) continue;
    sums.spent_micro_usd += team.spent_micro_usd;
    if (payer === team) sums.usd += budgetOf(team)!;
  }
  return sums;
}

export const number = (value: unknown): number | null => (typeof value === "number" && Number.isFinite(value) ? value : null);

export function progressOf(job: Job): number | null {
  const step = number(job.progress.step);
  const steps = number(job.progress.steps);
  return step != null && steps ? Math.min(1, step / steps) : null;
}
