"""The price of getting data to nodes: a cheap far zone loses when the data are large, and the decision says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.autoscaler.world import Cluster

from raytide.autoscaler.explain import lines
from raytide.control.reconcile.decide import data_costs, decide
from raytide.control.views import JobView
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import Shape
from raytide.core.objects.hardware.transfer import DataInput, TransferSection
from raytide.core.objects.node import NodeType
from raytide.core.objects.plan import Launch
from raytide.scheduling.offerings import Offering, OfferingTable
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
