"""The API's metrics of jobs, costs, GPUs and nodes, from records as the controller writes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.api.test_routes import LOCAL
from tests.dashboards.rules.test_evaluation import InMemory
from tests.registry.rollout.test_lifecycle import PLAN
from tests.stores import new_store

from raytide.autoscaler.nodes.exporter.kernel import oom_kills
from raytide.control.api.services.limits import LimitsService
from raytide.control.api.services.metrics.cluster import MOST_REPORTS, cost_samples, job_samples
from raytide.control.api.services.metrics.endpoints import REGRESSION_SHOWN_S, ReplicaRestarts, canary_samples
from raytide.control.api.services.metrics.page import AUDIT_PERIOD_S, ApiMetrics, AuditCheck
from raytide.control.views import Live
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.endpoint_load import LOADING, EndpointLoad, ReplicaLive, ReplicaLoad, ReplicaStartup, Traffic
from raytide.core.objects.ledger_entry import Entry, EntryKind, OpenInterval, Share
from raytide.core.objects.node import CapacityType, Node, NodeMeasurement, NodeReading, NodeState
from raytide.core.objects.team import TeamSpec
from raytide.core.specs.rollout import CountedRevision
from raytide.core.state import Changes, Store, tables
from raytide.core.state.codec import finite
from raytide.core.state.queries.jobs import HeldJob, WaitingJob
from raytide.core.state.tenancy.audit import acting
from raytide.core.telemetry.catalogue import METRICS
from raytide.core.telemetry.catalogue.training import JOB_RESTARTS
from raytide.core.telemetry.metrics import MetricSample, render
from raytide.dashboards.history.points import Labels, label_set
from raytide.dashboards.history.reader import HistoryReader
from raytide.dashboards.history.writer import HistoryWriter
from raytide.dashboards.monitor.scraper import PageReader
from raytide.dashboards.rules.alerts import ALERTS
from raytide.dashboards.rules.evaluation import evaluate
from raytide.dashboards.rules.expressions import Condition
from raytide.ledger.book import lost
from raytide.registry.rollout.lifecycle import RolloutView, advance

DAY_US = 86_400_000_000


class NoTrouble:
    def free_bytes(self) -> int:
        return 1

    def troubles(self) -> tuple[()]:
        return ()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = new_store(tmp_path)
    yield opened
    opened.close()


class Page:
    """The values of one page by metric and labels."""

    def __init__(self, found: Any) -> None:
        self.values = {(sample.metric.name, sample.labels): sample.value for sample in found}

    def __call__(self, name: str, *labels: str) -> float | None:
        return self.values.get((name, labels))


def test_training_jobs_show_what_their_drivers_report_and_the_user_s_own_values() -> None:
    progress = {
        "step": 40, "loss": 2.5, "tokens_per_s": 1000.0, "mfu": 0.4, "step_s": 0.5, "data_wait": 0.1,
        "step_at_s": 990.0, "saved_at_s": 700.0, "restarts": 2, "left_s": 9.0,

        "not_saved": "no space left", "slowest_rank": 3, "slowest_ratio": 1.7,
        "accuracy": 0.75, "note": "text", "is_warm": True, "broken": float("nan"),
    }  # fmt: skip
    page = Page(
        job_samples([HeldJob("job-1", "red", "train", 1, progress)], [WaitingJob("job-2", "blue", 400.0)], 1000.0)
    )
    job = ("job-1", "red")
    for name, value in (
        ("step", 40), ("loss", 2.5), ("tokens_per_second", 1000), ("mfu_ratio", 0.4), ("step_seconds", 0.5),
        ("data_wait_ratio", 0.1), ("last_step_age_seconds", 10), ("checkpoint_age_seconds", 300),
    ):  # fmt: skip
        assert page(f"raytide_job_{name}", *job) == value
    assert [page("raytide_job_restarts", *job, of) for of in ("driver", "gang")] == [1, 2]
    assert page("raytide_job_checkpoint_failing", *job) == 1
    assert page("raytide_job_straggler_ratio", *job, "3") == 1.7
    assert page("raytide_job_report", *job, "accuracy") == 0.75
    assert {labels[2] for name, labels in page.values if name == "raytide_job_report"} == {"accuracy"}
    assert page("raytide_gang_pending_seconds", "job-2", "blue") == 600.0


def test_a_new_driver_that_counts_from_zero_is_one_restart_for_the_alert() -> None:
    """`RestartLoop` counts an hour's restarts: here one, of the driver."""
    stored: dict[Labels, list[tuple[float, float]]] = {}
    for at_s, restarts, of_gang in ((1000.0, 3, 1), (1600.0, 3, 1), (2200.0, 4, 1), (2800.0, 4, 0), (3400.0, 4, 0)):
        job = HeldJob("job-1", "red", "train", restarts, {"restarts": of_gang})
        for sample in job_samples([job], [], at_s):
            if sample.metric is JOB_RESTARTS:
                labels = label_set(dict(zip(sample.metric.labels, sample.labels, strict=True)))
                stored.setdefault(labels, []).append((at_s, sample.value))
    (rule,) = (each for each in ALERTS if each.name == "RestartLoop")
    assert isinstance(rule.expr, Condition)
    found = evaluate(rule.expr.left, InMemory({JOB_RESTARTS.exposed_name: stored}), 3400.0)
    assert found == {(("job", "job-1"), ("team", "red")): pytest.approx(1.0, abs=0.2)}


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(2.5, 1), (math.nan, 0), (-math.inf, 0), ("diverged", None), (True, None)],
)
def test_a_loss_that_is_not_finite_is_shown_as_such(loss: float | str, shown: int | None) -> None:
    page = Page(job_samples([HeldJob("job-1", "red", "train", 0, finite({"loss": loss}))], [], 0.0))
    assert page("raytide_job_loss_finite", "job-1", "red") == shown


def test_a_job_that_reports_a_thousand_names_shows_the_first_of_them() -> None:
    job = HeldJob("job-1", "red", "gang", 0, {f"own-{n:04}": n for n in range(1000)})
    shown = [sample for sample in job_samples([job], [], 0.0) if sample.metric.name == "raytide_job_report"]
    assert [sample.labels[2] for sample in shown] == [f"own-{n:04}" for n in range(MOST_REPORTS)]


def test_the_page_shows_gpus_by_use_unit_costs_and_lost_nodes(store: Store) -> None:
    config = load_cluster(LOCAL)
    gpu_type = next(each for each in config.node_types if each.resources.get("GPU"))
    store.save_endpoint(ServeSpec(name="chat", model="/m"), "ana", 0.0)

    def node(id: str, state: NodeState, **more: Any) -> Node:
        spot = CapacityType.SPOT
        return Node(id, gpu_type.name, "a", spot, 8_000_000, state, 0.0, **{"started_at_s": 0.0, **more})

    half = Share(EntryKind.ENDPOINT, "chat", "default", 0.5)
    shares = (half, Share(EntryKind.IDLE, "", "", 0.25), Share(EntryKind.JOB, "job-1", "default", 0.25))
    nodes = (
        node("node-1", NodeState.READY, ready_at_s=1.0),
        node("node-2", NodeState.GONE, ready_at_s=1.0, ended_at_s=5.0, reason="the provider takes it back"),
        node("node-3", NodeState.GONE, ended_at_s=5.0, reason="no capacity"),
        node("node-4", NodeState.GONE, ready_at_s=1.0, ended_at_s=5.0, reason="idle for 60 s"),
    )
    opened = (OpenInterval("node-1", 8_000_000, 0, 0, shares),)
    store.commit(Changes(at_s=0.0, nodes=nodes, intervals=opened))
    load = EndpointLoad(
        0.0, 3.0, 1, replicas=(ReplicaLoad("r1", 0.0, kv_use=0.5),), traffic=Traffic(1.0, output_tps=1000.0, ttft_s=0.2)
    )
    adapters = ({"a": "", "b": LOADING}, {"a": "", "b": "adapter b is of another model."})
    load = replace(load, live=tuple(ReplicaLive(f"r{n}", each) for n, each in enumerate(adapters)))
    reading = NodeReading(0.0, memory_use=0.5, network_in_bps=7.0, oom_kills=2.0, clock_skew_s=-3.5)
    live = Live(0.0, loads={"chat": load}, measured={"node-1": NodeMeasurement(reading, {"nvml": 3.0}, {"nvml": 9.0})})
    accounts = LimitsService(store, config)
    metrics = ApiMetrics(store, config, accounts, NoTrouble())  # type: ignore[arg-type]
    killed_before = oom_kills() or 0
    found = list(metrics.samples(live, 3600.0))
    page, gpus = Page(found), gpu_type.resources["GPU"]
    assert page("raytide_gpus", "serving", "spot") == gpus / 2
    assert page("raytide_gpus", "idle", "spot") == gpus / 4
    assert page("raytide_gpus", "batch", "spot") == gpus / 4, "no training job"
    assert page("raytide_endpoint_usd_per_mtoken", "chat") == pytest.approx(4.0 / 3.6)
    assert page("raytide_endpoint_tokens_per_joule", "chat") == pytest.approx(1000.0 / 1.5), "half of the node's 3 W"
    assert page("raytide_nodes_lost", gpu_type.name, "spot") == 1
    assert page("raytide_spot_notices", gpu_type.name) == 1
    assert page("raytide_launch_failures", gpu_type.name, "a") == 1
    assert page("raytide_node_use_ratio", "node-1", "memory") == 0.5
    assert page("raytide_node_oom_kills", "node-1") == 2
    assert killed_before <= (page("raytide_node_oom_kills", "head") or 0) <= (oom_kills() or 0), "that of this machine"
    assert page("raytide_node_clock_skew_seconds", "node-1") == -3.5
    assert [page("raytide_adapters", "chat", state) for state in ("loaded", "loading", "failed")] == [2, 1, 1]
    assert page("raytide_audit_missing_entries") == 0
    assert page("raytide_node_power_watts", "node-1", "nvml") == 3.0
    assert page("raytide_node_energy_joules", "node-1", "nvml") == 9.0
    assert all(METRICS[sample.metric.name] is sample.metric for sample in found)
    assert all(isinstance(sample, MetricSample) for sample in found)


def test_budgets_show_what_is_used_and_what_will_be_at_the_end_of_the_month(store: Store) -> None:
    now_us = 20 * DAY_US  # 1970-01-21: eleven days of the month are left
    entry = Entry("node-1", now_us, now_us + 1, EntryKind.JOB, "job-1", "red", 1, amount_micro_usd=5_000_000)
    share = Share(EntryKind.JOB, "job-1", "red", 1.0)
    opened = OpenInterval("node-1", 1_000_000, now_us, now_us, (share,))
    store.commit(Changes(at_s=0.0, entries=(entry,), intervals=(opened,)))
    teams = {"red": TeamSpec(budget={"hard_usd": 20.0}), "blue": TeamSpec()}  # type: ignore[arg-type]
    page = Page(cost_samples(store.books, teams, store.books.intervals(), now_us))
    assert page("raytide_team_budget_used_ratio", "red") == 0.25
    assert page("raytide_team_budget_forecast_ratio", "red") == pytest.approx((5 + 11 * 24) / 20)
    assert page("raytide_team_budget_used_ratio", "blue") is None
    assert page("raytide_booked_usd", "job") == 5.0


def test_the_budget_of_a_team_pays_for_the_teams_below_it(store: Store) -> None:
    now_us = 20 * DAY_US  # eleven days of the month are left
    entry = Entry("node-1", now_us, now_us + 1, EntryKind.JOB, "job-1", "vision", 1, amount_micro_usd=19_000_000)
    opened = OpenInterval("node-1", 1_000_000, now_us, now_us, (Share(EntryKind.JOB, "job-1", "vision", 1.0),))
    store.commit(Changes(at_s=0.0, entries=(entry,), intervals=(opened,)))
    budgets = {"research": {"budget": {"hard_usd": 20.0}}, "vision": {"parent": "research"}}
    teams = {name: TeamSpec.parse(spec, where=name) for name, spec in budgets.items()}
    page = Page(cost_samples(store.books, teams, store.books.intervals(), now_us))
    assert page("raytide_team_budget_used_ratio", "research") == 0.95
    assert page("raytide_team_budget_forecast_ratio", "research") == pytest.approx((19 + 11 * 24) / 20)
    assert page("raytide_team_budget_used_ratio", "vision") is None


def test_lost_work_moves_from_jobs_to_waste_in_the_history_too(store: Store, tmp_path: Path) -> None:
    entry = Entry("node-1", 0, 60_000_000, EntryKind.JOB, "job-1", "red", 1, amount_micro_usd=5_000_000)
    moved = lost([entry], until_us=60_000_000, lost_us=24_000_000, cause="node-2")
    path = tmp_path / "history.sqlite"
    writer = HistoryWriter(path, low_bytes=0)
    reader = PageReader(writer, {})
    for at_s, entries in ((1000.0, (entry,)), (1015.0, moved)):
        store.commit(Changes(at_s=at_s, entries=entries))
        text = render(cost_samples(store.books, {}, (), 0)).decode()
        assert writer.write(at_s, reader.read(text)), writer.problem
    writer.close()
    curves = HistoryReader(path).query("raytide_booked_usd", {}, 1000.0, 1015.0, 15.0, by=("kind",))
    assert {dict(curve.labels)["kind"]: curve.points[-1][1] for curve in curves} == {"job": 3.0, "waste": 2.0}


def test_a_replica_whose_place_another_one_takes_is_counted_and_scaling_is_not() -> None:
    def load(*ids: str) -> dict[str, EndpointLoad]:
        startups = tuple(ReplicaStartup(id, 0.0, (), True) for id in ids)
        return {"chat": EndpointLoad(0.0, 0.0, len(ids), startups=startups)}

    restarts = ReplicaRestarts()
    for loads in (load("a"), load("a", "b"), load("a"), load("c"), {}, load("d")):
        restarts.observe(loads)
    assert [(sample.labels, sample.value) for sample in restarts.samples()] == [(("chat",), 1)]


def test_a_gap_in_the_audit_log_is_found_within_minutes_and_not_looked_for_at_each_read(store: Store) -> None:
    with acting("ana", 1.0):
        for name in ("red", "blue", "green"):
            store.save_team(name, {"weight": 2.0})
    check = AuditCheck(store.tenancy.audit)
    assert check.sample(1000.0).value == 0
    with store.tenancy.audit._db.write() as c:
        c.execute(tables.audit.delete().where(tables.audit.c.object == "blue"))
    assert check.sample(1000.0 + AUDIT_PERIOD_S - 1.0).value == 0, "it was not looked for"
    assert check.sample(1000.0 + AUDIT_PERIOD_S).value == 1
    assert check.sample(3.0).value == 1, "a clock that was put back does not stop it"


def test_a_canary_that_was_rolled_back_shows_by_what_for_an_hour(store: Store) -> None:
    store.save_endpoint(ServeSpec(name="web", model="/m"), "ana", 0.0)
    begun = store.rollouts.start(ServeSpec(name="web", model="/m2"), "canary", PLAN, "ana", 100.0, "")
    challenger, one_more = store.endpoint("web"), store.endpoint(begun.challenger_application)
    found = advance(begun, RolloutView(challenger, one_more, 1), 101.0)
    assert list(canary_samples([found])) == []
    bad = {
        begun.champion: CountedRevision(rollout=1, revision=begun.champion, requests=100),
        begun.challenger: CountedRevision(rollout=1, revision=begun.challenger, requests=40, errors=40),
    }
    found = advance(found, RolloutView(challenger, one_more, 1, bad), 102.0)
    store.commit(Changes(at_s=102.0, rollouts=(found,)))
    page = Page(canary_samples(store.rollouts.rolled_back(102.0 + 3500.0 - REGRESSION_SHOWN_S)))
    assert page.values == {("raytide_canary_regression_ratio", ("web", "errors")): 1.0}
    assert store.rollouts.rolled_back(102.0 + 3700.0 - REGRESSION_SHOWN_S) == ()
