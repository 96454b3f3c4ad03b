"""The controller adds facts to a snapshot from its books and from nodes that are gone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from raytide.autoscaler.nodes.lifecycle import ENDED_BY_PROVIDER
from raytide.control.reconcile.decision_inputs import SPEND_PERIOD_S, DecisionInputs
from raytide.core.objects.cluster_config import ClusterConfig, LimitsSection, RaytideSection
from raytide.core.objects.ledger_entry import Spent
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.snapshot import Limits, Snapshot

SPOT = NodeType(name="s", resources={"GPU": 1}, market=CapacityType.SPOT, price_micro_usd_h=1_000_000, zones=("a",))
NOW_S = 29 * 24 * 3600.0
"""Two days before the end of January 1970."""


@dataclass
class Books:
    """Also the store: nodes that are gone, and what was booked since when."""

    gone: tuple[Node, ...] = ()
    booked_micro_usd: int = 0
    asked: list[str] = field(default_factory=list)

    @property
    def books(self) -> Books:
        return self

    def nodes(self, *, limit: int) -> tuple[Node, ...]:
        return self.gone

    def spent(self, jobs: list[str], month: str) -> Spent:
        self.asked.append(month)
        return Spent(teams_month={"default": self.booked_micro_usd})

    def intervals(self) -> tuple[()]:
        return ()


def outlook(books: Books, **limits: float) -> DecisionInputs:
    settings = RaytideSection(node_types={}, limits=LimitsSection.model_validate(limits))
    return DecisionInputs(cast(Any, books), ClusterConfig(name="c", node_types=(SPOT,), settings=settings), NOW_S)


def seen(at_s: float = NOW_S) -> Snapshot:
    return Snapshot(at_s=at_s, node_types=(SPOT,))


def test_i6_a_month_s_budget_becomes_what_the_fleet_may_cost_an_hour_and_is_summed_once_a_minute() -> None:
    books = Books(booked_micro_usd=520_000_000)
    watched = outlook(books, month_usd=1000.0)
    assert watched.add_to(seen(), (), {}).limits == Limits(8_000_000, 10_000_000, most_micro_usd_h=10_000_000)
    books.booked_micro_usd = 1_000_000_000
    assert watched.add_to(seen(NOW_S + 1.0), (), {}).limits.hard_micro_usd_h == 10_000_057
    assert watched.add_to(seen(NOW_S + SPEND_PERIOD_S), (), {}).limits == Limits(0, 0, most_micro_usd_h=0)
    assert books.asked == ["1970-01", "1970-01"]


def test_without_a_month_s_budget_nobody_looks_into_the_books() -> None:
    books = Books()
    assert outlook(books, hard_usd_h=3.0).add_to(seen(), (), {}).limits == Limits(
        None, 3_000_000, most_micro_usd_h=3_000_000
    )
    assert books.asked == []


def test_losses_of_nodes_that_are_gone_and_the_price_of_the_moment_are_quoted() -> None:
    gone = Node(
        "node-1", "s", "a", CapacityType.SPOT, 1, NodeState.GONE, 0.0, ready_at_s=NOW_S - 600.0, ended_at_s=NOW_S
    )
    lost = [replace(gone, id=f"node-{n}", reason=ENDED_BY_PROVIDER) for n in range(3)]
    (calm,) = outlook(Books()).add_to(seen(), (), {}).quotes
    (stormy,) = outlook(Books(gone=tuple(lost))).add_to(seen(NOW_S + 1.0), (), {("s", "a"): 7}).quotes
    assert stormy.deaths_per_h > calm.deaths_per_h
    assert (calm.price_micro_usd_h, stormy.price_micro_usd_h) == (None, 7)


def test_a_new_month_begins_with_its_own_sum() -> None:
    end_s = 31 * 24 * 3600.0
    books = Books(booked_micro_usd=900_000_000)
    watched = outlook(books, month_usd=1000.0)
    watched.add_to(seen(end_s - 5.0), (), {})
    books.booked_micro_usd = 0
    limits = watched.add_to(seen(end_s + 1.0), (), {}).limits
    assert limits.most_micro_usd_h == int(1_000_000_000 / (28 * 24 - 1 / 3600))
    assert books.asked == ["1970-01", "1970-02"]
