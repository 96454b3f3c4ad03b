"""The price of getting data to nodes: a cheap far zone loses when the data are large, and the decision says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from tests.autoscaler.endpoints.test_slo_policy import SOLID, SPOT, bought, node, snapshot, worth
from tests.autoscaler.world import Cluster

from raytide.autoscaler.deadlines.jobs import with_market_constraints
from raytide.autoscaler.endpoints.slo_policy import prices
from raytide.autoscaler.explain import lines
from raytide.control.reconcile.decide import data_costs, decide
from raytide.control.views import JobView
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.hardware.transfer import DataInput, TransferSection
from raytide.core.objects.job import Job, JobSpec, JobState
from raytide.core.objects.node import CapacityType, NodeType
from raytide.core.objects.plan import Launch
from raytide.core.objects.snapshot import Snapshot
from raytide.scheduling.offerings import Offering, Offerings, OfferingTable
from raytide.sdk.jobs.job_run import explain

NEAR = NodeType(
    name="near",
    resources={"GPU": 2},
    price_micro_usd_h=3_000_000,
    max_nodes=4,
    idle_timeout_s=20,
    zones=("us-east-1a",),
    provider="aws",
)
FAR = NEAR.model_copy(
    update={"name": "far", "price_micro_usd_h": 2_000_000, "zones": ("us-west-2a",), "provider": "west"}
)
TRANSFER = TransferSection.model_validate(
    {
        "data": {"s3://data/": ["us-east-1"], "s3://data/copied": ["us-east-1", "west"]},
        "prices": [{"from": "us-east-1", "to": "us-west-2", "usd_per_gb": 0.02}],
        "other_usd_per_gb": 0.09,
        "stay_h": 4,
    }
)


class WithData(Cluster):
    def __init__(self, transfer: TransferSection | None = TRANSFER) -> None:
        super().__init__((NEAR, FAR))
        settings = self.config.settings.model_copy(update={"transfer": transfer})
        self.config = self.config.model_copy(update={"settings": settings})

    def bought(self, ticks: int = 30) -> list[Launch]:
        return [action for action in self.settle(ticks) if isinstance(action, Launch)]


def shape(gb: float, url: str = "s3://data/corpus", members: int = 1) -> Shape:
    return Shape(members=members, resources={"GPU": 2}, inputs=(DataInput(url=url, gb=gb),))


@pytest.mark.parametrize(
    ("gb", "url", "transfer", "where"),
    [
        (100, "s3://data/corpus", TRANSFER, "far"),  # 100 GB x $0.02 / 4 h = $0.50/h, and $1.00/h is saved
        (300, "s3://data/corpus", TRANSFER, "near"),  # $1.50/h
        (300, "s3://data/copied/corpus", TRANSFER, "far"),  # a copy lies there
        (300, "s3://database/corpus", TRANSFER, "far"),  # nothing is known of its place
        (300, "s3://data/corpus", None, "far"),
    ],
)
def test_a_cheap_far_region_loses_when_the_data_are_large(
    gb: float, url: str, transfer: TransferSection | None, where: str
) -> None:
    cluster = WithData(transfer)
    cluster.submit(shape(gb, url))
    assert [launch.node_type for launch in cluster.bought()] == [where]


def test_the_decision_names_the_data_and_their_price_on_both_sides() -> None:
    cluster = WithData()
    cluster.submit(shape(100))
    (launch,) = cluster.bought()
    assert "far in us-west-2a" in launch.reason
    assert "$0.50/h a member of them for data: 100 GB of s3://data/corpus from us-east-1 at $0.02 a GB" in launch.reason
    cluster.submit(shape(300))
    (launch,) = cluster.bought()
    assert "for data" not in launch.reason
    (rejected,) = launch.rejected
    assert rejected.choice == "far in us-west-2a"
    assert rejected.extra_micro_usd_h == 500_000
    assert "costs $0.50/h more for the same members, and $1.50/h a member of them for data" in rejected.reason
    plan = {"at_s": 0.0, "actions": [{"action": "launch", "node_id": "n", "node_type": "near", "zone": "z"}]}
    plan["actions"][0] |= {"subject": "l", "reason": launch.reason, "rejected": [vars_of(rejected)]}  # type: ignore[index]
    assert any("for data: 300 GB" in line for line in lines([plan]))


def test_a_job_says_what_its_data_cost_while_it_waits_and_on_its_nodes() -> None:
    cluster = WithData()
    cluster.submit(Shape(members=1, resources={"GPU": 2}))
    paying, near = cluster.submit(shape(100)), cluster.submit(shape(300))
    cluster.tick()
    words = "$0.50/h a member on far in us-west-2a: 100 GB of s3://data/corpus from us-east-1 at $0.02 a GB"
    assert data_costs(cluster.seen) == {paying: words}
    cluster.settle(30)
    assert data_costs(cluster.seen) == {paying: words}
    view = JobView(cluster.book.jobs[paying], None, 0, 0, data=words)
    assert explain(view).endswith(f" For its data the planner counts {words}.")
    assert near not in data_costs(cluster.seen), "it runs where its data are"
    assert data_costs(WithData(None).seen) == {}


def test_a_tick_with_prices_of_data_builds_the_offerings_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = WithData()
    paying = cluster.submit(shape(100))
    cluster.tick()
    built = list[int]()
    build = OfferingTable.__init__

    def counted(self: OfferingTable, offerings: Sequence[Offering], transfer: TransferSection | None = None) -> None:
        built.append(len(offerings))
        build(self, offerings, transfer)

    monkeypatch.setattr(OfferingTable, "__init__", counted)
    seen = replace(cluster.seen, at_s=cluster.seen.at_s + 1.0, node_types=(*cluster.seen.node_types,))
    decide(seen)
    assert list(data_costs(seen)) == [paying]
    assert built == [2]
    later = replace(seen, node_types=(NEAR,))
    assert data_costs(later) == {} and built == [2, 1], "other node types have other offerings"


def vars_of(rejected: object) -> dict[str, object]:
    return {name: getattr(rejected, name) for name in ("choice", "reason", "extra_micro_usd_h")}


def test_every_member_pays_for_what_it_reads() -> None:
    cluster = WithData()
    half = Shape(members=2, resources={"GPU": 1}, inputs=(DataInput(url="s3://data/x", gb=120),))
    cluster.submit(half)  # $0.60/h each, so $1.20/h on one far node
    assert [launch.node_type for launch in cluster.bought()] == ["near"]


def test_replicas_and_moves_count_their_data_too() -> None:
    cluster = WithData()
    inputs = (DataInput(url="s3://data/weights", gb=300),)
    replicas = Replicas(min=1, max=1, target_ongoing=4)
    cluster.serve(ServeSpec(name="m", model="/m", resources={"GPU": 2}, replicas=replicas, inputs=inputs), ongoing=1.0)
    assert [launch.node_type for launch in cluster.bought()] == ["near"]
    assert cluster.bought(150) == [], "it does not move to the cheaper region, whatever time passes"
    for _ in range(150):
        cluster.tick(16.0)
    assert [machine.node_type for machine in cluster.machines()] == ["near"]
    settings = cluster.config.settings.model_copy(update={"transfer": None})
    cluster.config = cluster.config.model_copy(update={"settings": settings})
    for _ in range(150):
        cluster.tick(16.0)
    assert [machine.node_type for machine in cluster.machines()] == ["far"], "without that price it does"


def test_what_a_reclaim_costs_includes_reading_again() -> None:
    inputs = (DataInput(url="s3://data/x", gb=100),)
    assert TRANSFER.micro_usd_h(inputs, FAR, "us-west-2a") == pytest.approx(500_000)
    assert TRANSFER.micro_usd_h(inputs, FAR, "us-west-2a", reclaims_per_h=0.5) == pytest.approx(1_500_000)
    assert TRANSFER.micro_usd_h(inputs, NEAR, "us-east-1a", reclaims_per_h=0.5) == 0.0
    elsewhere = FAR.model_copy(update={"provider": "google"})
    assert TRANSFER.usd_per_gb("s3://data/x", elsewhere, "europe-west4-a") == (0.09, "us-east-1")
    by_zone = TransferSection.model_validate(
        {
            "data": {"/srv": ["us-east-1a"]},
            "prices": [{"from": "us-east-1a", "to": "us-east-1b", "usd_per_gb": 0.01}],
            "other_usd_per_gb": 0.09,
        }
    )
    assert by_zone.usd_per_gb("/srv/x", NEAR, "us-east-1a") == (0.0, "us-east-1a")
    assert by_zone.usd_per_gb("/srv/x", NEAR, "us-east-1b") == (0.01, "us-east-1a")
    assert by_zone.usd_per_gb("/srvother", NEAR, "us-east-1b") == (0.0, "")


def test_a_snapshot_carries_the_prices() -> None:
    cluster = WithData()
    cluster.tick()
    assert cluster.seen.transfer == TRANSFER


def with_inputs(seen: Snapshot, gb: float) -> Snapshot:
    """Returns the snapshot with an endpoint whose weights lie in us-1, and with the prices between places."""
    lies = {"data": {"s3://weights": ["us-1"]}, "other_usd_per_gb": 0.02, "stay_h": 4}
    (view,) = seen.endpoints
    spec = view.endpoint.spec.model_copy(update={"inputs": (DataInput(url="s3://weights/m", gb=gb),)})
    views = (replace(view, endpoint=replace(view.endpoint, spec=spec)),)
    return replace(seen, endpoints=views, transfer=TransferSection.model_validate(lies))


@pytest.mark.parametrize(
    ("gb", "zones"),
    [
        (1, {"us-1a", "us-1b", "eu-1a"}),
        (300, {"us-1a", "us-1b"}),  # $1.50/h of 4 h, and more after each loss, are more than the spread is worth
    ],
)
def test_the_replica_count_policy_buys_spot_where_the_weights_are_if_they_are_large(gb: float, zones: set[str]) -> None:
    plan = decide(with_inputs(snapshot(worth(5, 3), node(1, SPOT, "us-1a")), gb))
    assert {zone for _, zone in bought(plan.actions)} | {"us-1a"} == zones
    assert sum(bought(plan.actions).values()) == 4


def test_the_values_of_replicas_come_from_prices_with_their_data() -> None:
    seen = snapshot(None, types=(SOLID, SPOT.model_copy(update={"zones": ("us-1a", "eu-1a")})))
    quotes = tuple(replace(quote, deaths_per_h=0.0) for quote in seen.quotes)
    seen = with_inputs(replace(seen, quotes=quotes), 100)
    ondemand_usd_h, spot_usd_h = prices(seen.endpoints[0], Offerings.from_snapshot(seen))
    assert (ondemand_usd_h, spot_usd_h) == (3.0, {"gpu.spot/us-1a": 1.0, "gpu.spot/eu-1a": 1.5})


def test_a_replica_that_has_its_weights_is_not_moved_to_cheaper_spot_that_would_read_them_again() -> None:
    far = SPOT.model_copy(update={"zones": ("eu-1a",)})
    seen = snapshot(worth(1, 0), node(1, SOLID, "us-1a"), types=(SOLID, far))
    assert bought(decide(with_inputs(seen, 1)).actions) == {("gpu.spot", "eu-1a"): 1}
    assert decide(with_inputs(seen, 1000)).actions == ()


@pytest.mark.parametrize(
    ("gb", "reason"), [(50, "on spot"), (5000, "spot is no cheaper, the transfer of its data included")]
)
def test_the_deadline_policy_leaves_spot_far_from_large_data(gb: float, reason: str) -> None:
    spot = FAR.model_copy(update={"market": CapacityType.SPOT, "price_micro_usd_h": 1_000_000})
    now_s = 1_790_000_000.0
    deadline = datetime.fromtimestamp(now_s + 12 * 3600, UTC)
    fields = {"kind": "train", "name": "j", "gang": GangSpec(shapes=(shape(gb),)), "deadline": deadline}
    jobs = tuple(
        Job(name, JobSpec.parse({**fields, "estimate_h": 3, **more}, where="job"), "ada", JobState.QUEUED, now_s)
        for name, more in (("with", {}), ("without", {"gang": GangSpec(shapes=(Shape(resources={"GPU": 2}),))}))
    )
    stances = with_market_constraints(Snapshot(now_s, (NEAR, spot), (), jobs, transfer=TRANSFER)).stances
    assert reason in stances["with"].reason
    assert stances["without"].reason.startswith("on spot"), "another job's data are not counted"
