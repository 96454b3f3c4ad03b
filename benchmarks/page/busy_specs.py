"""The specs, the nodes and the run files of a busy cluster. They are plausible, and equal for equal seeds."""

from __future__ import annotations

import json
import random
from pathlib import Path

from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.job import JobSpec
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.specs.data import DatasetVersionSpec
from raytide.core.specs.model_version import AliasSpec, ModelVersionSpec
from raytide.core.state import Store
from raytide.dashboards.alerts.records import FILE, AlertRecords
from raytide.dashboards.alerts.states import Alert, AlertState
from raytide.dashboards.history.points import label_set

TEAMS = ("research", "search", "chat", "data")
CLUSTER = """
cluster_name: harbour
max_workers: 400
provider: {type: local, head_ip: 127.0.0.1, worker_ips: []}
auth: {ssh_user: nobody}
head_node_type: head
available_node_types:
  head: {resources: {CPU: 0}, node_config: {}, min_workers: 0, max_workers: 0}
  h100x8: {resources: {CPU: 96, GPU: 8}, node_config: {}, max_workers: 99, labels: {ray.io/accelerator-type: H100}}
  h100x8.spot: {resources: {CPU: 96, GPU: 8}, node_config: {}, max_workers: 99, labels: {ray.io/accelerator-type: H100}}
  l4x4: {resources: {CPU: 48, GPU: 4}, node_config: {}, max_workers: 200, labels: {ray.io/accelerator-type: L4}}
  cpu32: {resources: {CPU: 32}, node_config: {}, max_workers: 100}
metadata:
  raytide:
    version: 1
    teams:
      research: {quota: {GPU: 400}, weight: 3, budget: {soft_usd: 180000, hard_usd: 240000}}
      search: {quota: {GPU: 160}, weight: 2, budget: {hard_usd: 90000}}
      chat: {quota: {GPU: 300}, weight: 2, budget: {hard_usd: 120000}}
      data: {quota: {GPU: 80}, weight: 1, budget: {soft_usd: 20000}}
    node_types:
      h100x8: {market: on-demand, price_usd_h: 31.4, zones: [eu-1a, eu-1b, eu-1c]}
      h100x8.spot: {market: spot, price_usd_h: 12.6, zones: [eu-1a, eu-1b, eu-1c]}
      l4x4: {market: on-demand, price_usd_h: 2.9, zones: [eu-1a, eu-1b]}
      cpu32: {market: on-demand, price_usd_h: 1.1, zones: [eu-1a]}
"""
TYPES = (
    ("h100x8", CapacityType.ON_DEMAND, 31_400_000, ("eu-1a", "eu-1b", "eu-1c"), 8),
    ("h100x8.spot", CapacityType.SPOT, 12_600_000, ("eu-1a", "eu-1b", "eu-1c"), 8),
    ("l4x4", CapacityType.ON_DEMAND, 2_900_000, ("eu-1a", "eu-1b"), 4),
)
MODELS = ("chat-70b", "chat-8b", "rank-2b", "embed-1b", "code-32b", "vision-11b")
RUNS = ("pretrain-7b", "sft-70b", "dpo-8b", "reward-8b", "distil-2b", "tokenise", "dedup", "eval-suite", "ablation")


def new_node(number: int, now_s: float, chance: random.Random) -> Node:
    name, market, price, zones, _ = TYPES[chance.choices(range(3), (3, 5, 2))[0]]
    state = chance.choices(
        (NodeState.READY, NodeState.LAUNCHING, NodeState.DRAINING), (94, 4, 2)
    )[0]  # fmt: skip
    ready_s = None if state is NodeState.LAUNCHING else now_s - 90_000
    return Node(
        f"node-{number}", name, chance.choice(zones), market, price, state, now_s - 90_100, now_s - 90_050,
        ready_s, drain_deadline_s=now_s + 90 if state is NodeState.DRAINING else None, ray_node_id=f"ray-node-{number}",
        reason="spot notice" if state is NodeState.DRAINING else "",
    )  # fmt: skip


def job_spec(number: int, folder: Path, begun_s: float, chance: random.Random) -> JobSpec:
    members = chance.choice((1, 1, 2, 2, 4, 8))
    run = RUNS[number % len(RUNS)]
    is_training = number % len(RUNS) < 5
    out = folder / "runs" / f"{run}-{number}"
    config: dict[str, object] = (
        {"name": run, "dataset": "/data", "out": str(out), "steps": 20_000}
        if is_training
        else {"command": ["python", f"{run}.py"]}
    )
    if is_training and number < 12:
        _run_files(out, number, begun_s)
    gang = {
        "shapes": [{"members": members, "resources": {"GPU": chance.choice((4, 8)) if members == 1 else 8, "CPU": 8}}]
    }
    kind = "train" if is_training else "script"
    team = TEAMS[chance.choices(range(4), (5, 2, 2, 1))[0]]
    fields = {"kind": kind, "name": f"{run}-{number}", "team": team, "gang": gang, "config": config}
    return JobSpec.parse({**fields, "priority": chance.choice(("low", "normal", "normal", "high"))}, where="job")


def _run_files(out: Path, seed: int, begun_s: float) -> None:
    """Writes a plausible run of two thousand logged steps, with one lost node."""
    chance = random.Random(seed)
    out.mkdir(parents=True)
    with open(out / "metrics.jsonl", "w") as file:
        for index in range(1, 2001):
            step = index * 5
            is_small = 700 < index < 1000
            line = {
                "step": step,
                "loss": 1.9 + 9.0 / (1 + step / 60) ** 0.6 + chance.gauss(0, 0.03) + seed * 0.02,
                "lr": 3e-4 * min(1.0, step / 400) * (1 - step / 30_000),
                "grad_norm": abs(chance.gauss(0.8, 0.15)),
                "tokens": 524_288,
                "step_s": (2.6 if is_small else 1.3) + chance.gauss(0, 0.03),
                "data_s": 0.05,
                "world": 4 if is_small else 8,
                "mfu": 0.41 + chance.gauss(0, 0.006),
                "tokens_per_s": (201_000 if is_small else 402_000) + chance.gauss(0, 4000),
                "times": {"data": 0.05, "forward": 0.42, "backward": 0.66, "optimizer": 0.12, "checkpoint": 0.02},
                "at_s": begun_s - 4800 + index * 2.2,
            }
            file.write(json.dumps(line) + "\n")
    at_s = begun_s - 4800
    events = (
        {"at_s": at_s + 700 * 2.2, "event": "resize", "step": 3500, "world": 4, "why": "node-31 was reclaimed"},
        {"at_s": at_s + 1000 * 2.2, "event": "resize", "step": 5000, "world": 8, "why": "4 members came back"},
        {"at_s": at_s + 1600 * 2.2, "event": "restart", "step": 8000, "why": "rank 3 died", "steps_lost": 4},
    )
    (out / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def serve_spec(number: int) -> ServeSpec:
    model = MODELS[number % len(MODELS)]
    replicas = {"min": 1, "max": 8, "slo_ttft_s": 0.5, "slo_target": 0.99} if number % 3 else {"min": 1, "max": 4}
    return ServeSpec.parse(
        {
            "name": model if number < len(MODELS) else f"{model}-{number}",
            "model": f"/models/{model}",
            "team": TEAMS[number % 4],
            "replicas": replicas,
            "resources": {"GPU": 1, "CPU": 4},
        },
        where="serve",
    )


def add_models(store: Store, job: str, now_s: float) -> None:
    """Registers a dataset with two versions, and four models with three versions each. All models were trained on the
    newest version of the dataset. The second version of each model is its champion.
    """
    for version in (1, 2):
        data = {
            "name": "web-2026",
            "team": "research",
            "location": f"/data/web-2026/{version}",
            "sha256": f"{version:064x}",
            "documents": 41_000_000 * version,
            "read": 60_000_000 * version,
            "dropped": {"duplicate": 14_000_000 * version, "language": 5_000_000 * version},
            "tokens": 52_000_000_000 * version,
            "vocab_size": 128_000,
        }
        store.datasets.register(DatasetVersionSpec.parse(data, where="dataset"), "di", now_s - 86_400 * (9 - version))
    for name in MODELS[:4]:
        for version in range(1, 4):
            lineage = {"job": job, "dataset": "/data/web-2026/2", "dataset_sha256": f"{2:064x}", "code": "raytide 1.0"}
            metrics = {"perplexity": 9.4 - version / 3, "mmlu": 0.61 + version / 50}
            fields = {
                "name": name,
                "team": "research",
                "location": f"/models/{name}/{version}",
                "note": "after tuning",
                "sha256": "0" * 64,
            }
            spec = ModelVersionSpec.parse({**fields, "lineage": lineage, "metrics": metrics}, where="model")
            store.models.register(spec, "ana", now_s - 86_400 * (4 - version))
        for version in (1, 2):
            alias = AliasSpec.parse({"version": version, "why": "better on every suite"}, where="alias")
            store.models.promote(name, "champion", alias, "ana", now_s - 80_000 + 20_000 * version)


def add_alerts(folder: Path, now_s: float) -> None:
    """Writes two alerts that are firing, one that is pending, and one that is resolved."""
    states = (
        (
            "TtftP99AboveSlo",
            "critical",
            AlertState.FIRING,
            {"endpoint": "chat-8b"},
            0.62,
            "first tokens take 620 ms, 500 ms are promised",
        ),
        (
            "GpuEccUncorrectable",
            "critical",
            AlertState.FIRING,
            {"node": "node-7", "gpu": "3"},
            2.0,
            "2 uncorrectable errors on GPU 3",
        ),
        (
            "BudgetNearLimit",
            "warning",
            AlertState.PENDING,
            {"team": "data"},
            0.82,
            "82 % of this month's budget is spent",
        ),
        ("GangPendingTooLong", "warning", AlertState.RESOLVED, {"job": "job-7"}, 3900.0, "a gang waited for 65 min"),
    )
    alerts = [
        Alert(name, label_set(labels), severity, state, now_s - 240 - 60 * place, now_s - 200, value, summary)  # type: ignore[arg-type]
        for place, (name, severity, state, labels, value, summary) in enumerate(states)
    ]
    AlertRecords(folder / FILE).save(alerts, now_s)
