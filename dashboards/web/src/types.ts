// What the API sends, as far as the page reads it. Times are seconds since the epoch, money is micro-dollars.

export type Use = "training" | "serving" | "batch" | "unmanaged" | "starting" | "idle" | "lost";
export const USES: Use[] = ["training", "serving", "batch", "unmanaged", "starting", "lost", "idle"];

export interface Status {
  name: string;
  jobs: Record<string, number>;
  live_jobs: number;
  errors: string[];
  queue: number;
  plan?: number;
  price_micro_usd_h: number;
  cost_micro_usd: number;
}

export interface Job {
  id: string;
  name: string;
  kind: string;
  team: string;
  user: string;
  state: string;
  use: Use;
  reason: string;
  submitted_at_s: number;
  admitted_at_s: number | null;
  started_at_s: number | null;
  ended_at_s: number | null;
  restarts: number;
  preemptions: number;
  stop_requested: boolean;
  progress: Record<string, number | string>;
  priority: string;
  gang: string;
  gpus: number;
  cpus: number;
  wanted: number;
  ready: number;
  members: number;
  on: string[];
  due_at_s: number | null;
  position: number | null;
  constraint: string;
  waiting: string;
  remedy: string;
  wait_s: number | null;
  stance: string;
  /** What getting its data to its nodes adds to its price; empty if nothing is paid. */
  data: string;
  cost_micro_usd: number;
  price_micro_usd_h: number;
}

export interface Held {
  use: Use;
  subject: string;
  team: string;
  weight: number;
}

export interface NodeRow {
  id: string;
  type: string;
  zone: string;
  market: string;
  state: string;
  price_micro_usd_h: number;
  requested_at_s: number;
  ready_at_s: number | null;
  drain_deadline_s: number | null;
  lost_at_s: number | null;
  subject: string;
  reason: string;
  use: { cpu?: number; gpu?: number };
  held: Held[];
}

export interface Replica {
  id: string;
  node: string;
  running: number;
  waiting: number;
  kv_use: number;
}

export interface Endpoint {
  id: string;
  team: string;
  user: string;
  model: string;
  state: string;
  reason: string;
  created_at_s: number;
  base_url: string;
  revision: number;
  is_hosted: boolean;
  min: number;
  max: number;
  slo_ttft_s: number | null;
  slo_target: number | null;
  target: number;
  ready: number;
  ongoing: number;
  queued: number;
  rps: number;
  ahead_rps: number;
  tps: number;
  prompt_tps: number;
  ttft_s: number | null;
  kv_use: number | null;
  cold_start_s: number;
  waiting: string;
  starting: number;
  cost_micro_usd: number;
  counted: Record<string, number>;
  replicas: Replica[];
}

export interface Team {
  team: string;
  parent: string;
  weight: number;
  quota: Record<string, number>;
  soft_usd: number | null;
  hard_usd: number | null;
  spent_micro_usd: number;
  used: Record<string, number>;
  own: Record<string, number>;
  available: Record<string, number>;
  recent_gpu_h: number;
}

export interface NodeType {
  market: string;
  price_micro_usd_h: number;
  zones: string[];
  zone_prices: Record<string, number>;
  gpus: number;
  cpus: number;
  accelerator: string;
  max_nodes: number;
}

export interface Alert {
  name: string;
  severity: string;
  state: "pending" | "firing" | "resolved";
  labels: Record<string, string>;
  since_s: number;
  value: number | null;
  summary: string;
  page: string;
  action: { do: string; state: string; outcome: string } | null;
  silenced: boolean;
}

export interface Hello {
  user: string;
  team: string;
  page: string;
  at_s: number;
  types: Record<string, NodeType>;
}
