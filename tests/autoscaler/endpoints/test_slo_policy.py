"""An endpoint with an SLO: the production decision on snapshots, and a whole life of it over the fake provider."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.autoscaler import promises
from tests.autoscaler.world import CRASH_POINTS, Cluster, CrashPoint

from raytide.autoscaler.endpoints import targets
from raytide.autoscaler.endpoints.replica_hosts import EndpointHosts
from raytide.autoscaler.endpoints.slo_policy import replica_slots
from raytide.autoscaler.endpoints.traffic import MEMORY_S
from raytide.control.reconcile.decide import decide
from raytide.core.errors import ConfigError
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec, Speed
from raytide.core.objects.endpoint_load import Counters, EndpointLoad, ReplicaLoad, ReplicaValue, Traffic
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.plan import Action, Drain, Launch, Scale, Wait
from raytide.core.objects.snapshot import Demand, EndpointView, Limits, NodeView, Pool, Quote, Snapshot
from raytide.scheduling.replicas import replica_selector

SOLID = NodeType(
    name="gpu", resources={"GPU": 1}, price_micro_usd_h=3_000_000, zones=("us-1a",), max_nodes=20, idle_timeout_s=20
)
SPOT = SOLID.model_copy(
    update={
        "name": "gpu.spot",
        "market": CapacityType.SPOT,
        "price_micro_usd_h": 1_000_000,
        "zones": ("us-1a", "us-1b", "eu-1a"),
    }
)
SPEED = Speed(prefill_tps=1500.0, slots=8, tpot_ms=60.0)
SPEC = ServeSpec(
    name="m",
    model="/m",
    resources={"GPU": 1},
    replicas=Replicas(
        min=1, max=8, slo_ttft_s=5.0, slo_target=0.95, cold_start_s=30.0, speed={"gpu": SPEED, "gpu.spot": SPEED}
    ),
)
NOW_S = 10_000.0
LATE = (9000.0, 3000.0, 900.0, 200.0, 50.0, 10.0, 2.0, 0.5, 0.1)


def worth(spot: int, ondemand: int, *, is_sure: bool = True) -> ReplicaValue:
    return ReplicaValue(spot, ondemand, 0.01, LATE, 2.0, 0.4, is_sure)


def node(number: int, node_type: NodeType, zone: str, state: NodeState = NodeState.READY, used: int = 1) -> NodeView:
    ready_s = NOW_S - 3000.0 if state is NodeState.READY else None
    record = Node(
        f"node-{number}",
        node_type.name,
        zone,
        node_type.market,
        node_type.price_in(zone),
        state,
        NOW_S - 3100.0 if ready_s else NOW_S - 20.0,
        ready_at_s=ready_s,
        ray_node_id=f"ray-{number}" if ready_s else "",
        subject="m",
    )
    left = {name: amount - (used if ready_s else 0) for name, amount in node_type.resources.items()}
    return NodeView(record, node_type.resources, left, node_type.all_labels(zone))


def snapshot(
    known: ReplicaValue | None,
    *nodes: NodeView,
    seats: tuple[int, ...] | None = None,
    target: int | None = None,
    kv_use: float = 0.1,
    silent: int = 0,
    types: tuple[NodeType, ...] = (SOLID, SPOT),
    pools: tuple[Pool, ...] = (),
) -> Snapshot:
    """One replica on each node that is ready, or on those that are named."""
    ready = [view.node.ray_node_id for view in nodes if view.node.state is NodeState.READY]
    hosts = tuple(ready if seats is None else (f"ray-{seat}" for seat in seats))
    said = [
        ReplicaLoad(str(at), NOW_S - (60.0 if at < silent else 0.0), kv_use=kv_use, node=host)
        for at, host in enumerate(hosts)
    ]
    load = EndpointLoad(NOW_S, 2.0, len(hosts), hosts, tuple(said), Traffic(speed=SPEED))
    endpoint = Endpoint(SPEC, "me", EndpointState.RUNNING, 0.0, len(hosts) if target is None else target)
    return Snapshot(
        at_s=NOW_S,
        node_types=types,
        nodes=nodes,
        endpoints=(EndpointView(endpoint, load, known),),
        pools=pools,
        next_node=100,
        quotes=tuple(Quote("gpu.spot", zone, None, 0.2) for zone in SPOT.zones),
    )


def bought(actions: tuple[Action, ...]) -> Counter[tuple[str, str]]:
    return Counter((action.node_type, action.zone) for action in actions if isinstance(action, Launch))


def target_of(seen: Snapshot, actions: tuple[Action, ...]) -> int:
    (before,) = (view.endpoint.target_replicas for view in seen.endpoints)
    return next((action.replicas for action in actions if isinstance(action, Scale)), before)


def drained(actions: tuple[Action, ...]) -> list[str]:
    return [action.node_id for action in actions if isinstance(action, Drain)]


def test_spot_is_bought_over_regions_up_to_its_count_and_the_decision_says_why() -> None:
    seen = snapshot(worth(5, 3), node(1, SPOT, "us-1a"))
    plan = decide(seen)
    assert target_of(seen, plan.actions) == 5
    assert sum(bought(plan.actions).values()) == 4
    assert {zone for _, zone in bought(plan.actions)} >= {"us-1b", "eu-1a"}
    (scale,) = (action for action in plan.actions if isinstance(action, Scale))
    assert "1 -> 5: 2.00 requests/s are usual and a late one costs $0.0100" in scale.reason
    assert "5 replicas are worth the spot price, 3 the on-demand price" in scale.reason
    launch = next(action for action in plan.actions if isinstance(action, Launch) and action.zone == "eu-1a")
    assert "gpu.spot in eu-1a (spot at $1.00/h) costs it least, correlated losses included" in launch.reason
    others = {other.choice: (other.reason, other.extra_micro_usd_h) for other in launch.rejected}
    assert others["gpu.spot in us-1a"] == ("costs no more, but too many replicas would be lost there at once", 0)
    assert others["gpu in us-1a"][1] == 2_000_000 - round(0.2 / 6 * 1_000_000)


def test_where_spot_is_short_on_demand_fills_up_to_its_own_count() -> None:
    rests = [Pool("gpu.spot", zone, 2, NOW_S + 60.0, "no stock") for zone in ("us-1a", "us-1b")]
    tried = Pool("gpu.spot", "eu-1a", 3, NOW_S - 1.0, "no stock")
    seen = snapshot(worth(6, 4), node(1, SPOT, "us-1a"), pools=(*rests, tried))
    plan = decide(seen)
    assert bought(plan.actions) == {("gpu.spot", "eu-1a"): 1, ("gpu", "us-1a"): 2}  # a probe, and what is lacking
    assert target_of(seen, plan.actions) == 4


def test_on_demand_is_left_when_as_many_as_are_wanted_answer_without_it_and_the_node_is_drained() -> None:
    od, starting = node(1, SOLID, "us-1a"), node(2, SPOT, "us-1a", NodeState.LAUNCHING)
    wait = snapshot(worth(2, 2), od, starting, node(3, SPOT, "eu-1a"), target=3)
    assert (target_of(wait, decide(wait).actions), drained(decide(wait).actions)) == (3, [])
    there = snapshot(worth(2, 2), od, node(2, SPOT, "us-1a"), node(3, SPOT, "eu-1a"))
    plan = decide(there)
    assert (target_of(there, plan.actions), drained(plan.actions)) == (2, ["node-1"])
    (drain,) = (action for action in plan.actions if isinstance(action, Drain))
    assert (drain.kind, drain.cost_micro_usd_h, drain.deadline_s) == ("notice", -3_000_000, NOW_S + 600.0)
    assert drain.reason == "endpoint m has 2 replicas without it; saves $3.00/h"


def test_a_replica_that_shares_its_on_demand_node_stays_there_and_counts_as_one_on_spot() -> None:
    wide = SOLID.model_copy(update={"resources": {"GPU": 4}})
    shared = node(1, wide, "us-1a", used=3)
    seen = snapshot(worth(2, 1), shared, node(2, SPOT, "us-1b"), types=(wide, SPOT))
    plan = decide(seen)
    assert (target_of(seen, plan.actions), drained(plan.actions), bought(plan.actions)) == (2, [], {})


def test_replicas_of_one_endpoint_that_share_a_node_leave_it_together() -> None:
    wide = SOLID.model_copy(update={"resources": {"GPU": 2}})
    pair, spot = node(1, wide, "us-1a", used=2), [node(number, SPOT, "us-1b") for number in (2, 3, 4)]
    half = snapshot(worth(3, 4), pair, *spot[:2], seats=(1, 1, 2, 3), types=(wide, SPOT))
    assert drained(decide(half).actions) == []
    whole = snapshot(worth(3, 3), pair, *spot, seats=(1, 1, 2, 3, 4), types=(wide, SPOT))
    plan = decide(whole)
    assert (drained(plan.actions), target_of(whole, plan.actions)) == (["node-1"], 3)


def test_a_replica_that_ray_has_not_taken_off_its_node_yet_is_counted_once() -> None:
    early = node(3, SPOT, "us-1b", used=0)
    seen = snapshot(worth(2, 2), node(1, SOLID, "us-1a"), node(2, SPOT, "us-1a"), early, seats=(1, 2, 3), silent=1)
    assert [place.id for place in replica_slots(seen.endpoints[0], EndpointHosts.of(seen))] == [
        "node-1#0",
        "node-2#0",
        "node-3#0",
    ]
    there = snapshot(worth(2, 2), node(2, SPOT, "us-1a"), early, seats=(2, 3))
    assert [action for action in decide(there).actions if not isinstance(action, Wait)] == []


def test_a_replica_whose_process_starts_is_on_no_node_yet_and_has_its_place_all_the_same() -> None:
    taken = [node(number, SPOT, "us-1b") for number in (2, 3)]
    seen = snapshot(worth(2, 2), node(1, SOLID, "us-1a"), *taken, seats=(1,), target=3)
    assert [place.id for place in replica_slots(seen.endpoints[0], EndpointHosts.of(seen))] == [
        "node-1#0",
        "node-2~0",
        "node-3~0",
    ]
    assert bought(decide(seen).actions) == {} and target_of(seen, decide(seen).actions) == 3
    queued = replace(seen, demand=(Demand({"GPU": 1.0}, replica_selector(SPEC), 2),))
    assert sum(bought(decide(queued).actions).values()) == 2  # what is taken there is somebody else's


@pytest.mark.parametrize(("silent", "is_sure", "words"), [(1, True, "did not report"), (0, False, "not watched")])
def test_i8_silence_and_a_new_controller_take_nothing_away_but_replace_what_is_lost(
    silent: int, is_sure: bool, words: str
) -> None:
    known = worth(1, 1, is_sure=is_sure)
    there = tuple(node(number, SPOT, "us-1a") for number in (1, 2, 3))
    seen = snapshot(known, *there, silent=silent)
    plan = decide(seen)
    assert (target_of(seen, plan.actions), drained(plan.actions)) == (3, [])
    assert any(isinstance(a, Wait) and a.constraint == "signal" and words in a.reason for a in plan.actions)
    lost = snapshot(known, *there[:2], silent=silent, target=3)
    assert sum(bought(decide(lost).actions).values()) == 1


def test_i8_while_the_load_is_old_the_target_stays_even_above_its_maximum() -> None:
    seen = snapshot(worth(1, 1), *(node(number, SPOT, "us-1a") for number in range(1, 11)))
    (view,) = seen.endpoints
    assert view.load is not None
    stale = replace(seen, endpoints=(replace(view, load=replace(view.load, at_s=NOW_S - 60.0)),))
    assert [action for action in decide(stale).actions if not isinstance(action, Wait)] == []


def test_full_kv_caches_ask_for_more_than_the_policy_does() -> None:
    seen = snapshot(worth(2, 2), node(1, SPOT, "us-1a"), node(2, SPOT, "eu-1a"), kv_use=1.0)
    assert target_of(seen, decide(seen).actions) == 3
    many = tuple(node(number, SPOT, "us-1a") for number in range(1, 10))
    over = snapshot(worth(2, 2), *many, kv_use=1.0, target=9)
    assert target_of(over, decide(over).actions) == SPEC.replicas.max
    lately = snapshot(replace(worth(2, 2), least=4), *many[:4])
    assert target_of(lately, decide(lately).actions) == 4


def test_without_anything_to_buy_the_target_is_what_on_demand_would_be_worth_and_the_rest_waits() -> None:
    none = tuple(t.model_copy(update={"max_nodes": 1}) for t in (SOLID, SPOT))
    seen = snapshot(worth(5, 3), node(1, SPOT, "us-1a"), node(2, SOLID, "us-1a"), types=none)
    plan = decide(seen)
    assert (target_of(seen, plan.actions), bought(plan.actions)) == (3, {})
    assert any(isinstance(a, Wait) and a.subject == "m" and a.constraint == "capacity" for a in plan.actions)


def test_where_machines_are_free_they_are_taken_first_and_paid_ones_after_them() -> None:
    own = SOLID.model_copy(update={"price_micro_usd_h": 0, "max_nodes": 2})
    seen = snapshot(worth(4, 4), types=(own, SPOT), target=1)
    assert bought(decide(seen).actions) == {("gpu", "us-1a"): 2}
    full = snapshot(worth(4, 4), node(1, own, "us-1a"), node(2, own, "us-1a"), types=(own, SPOT))
    assert sum(count for (name, _), count in bought(decide(full).actions).items() if name == "gpu.spot") == 2


@pytest.mark.parametrize("price_micro_usd_h", [0, 900_000])
def test_nobody_leaves_a_machine_that_costs_no_more_than_spot_for_spot(price_micro_usd_h: int) -> None:
    own = SOLID.model_copy(update={"price_micro_usd_h": price_micro_usd_h, "max_nodes": 2})
    spot = [node(number, SPOT, zone) for number, zone in ((3, "us-1a"), (4, "us-1b"), (5, "eu-1a"), (6, "us-1a"))]
    full = snapshot(worth(4, 4), node(1, own, "us-1a"), node(2, own, "us-1a"), *spot, types=(own, SPOT))
    plan = decide(full)
    assert target_of(full, plan.actions) == 4
    assert set(drained(plan.actions)) < {"node-3", "node-4", "node-5", "node-6"}


@pytest.mark.parametrize(("silent", "is_sure"), [(1, True), (0, False)])
def test_i8_room_that_nobody_uses_is_not_held(silent: int, is_sure: bool) -> None:
    wide = SPOT.model_copy(update={"resources": {"GPU": 8}})
    known = worth(2, 2, is_sure=is_sure)
    seen = snapshot(known, node(1, wide, "us-1a", used=2), seats=(1, 1), silent=silent, types=(SOLID, wide))
    assert target_of(seen, decide(seen).actions) == 2
    lost = snapshot(known, node(1, wide, "us-1a", used=2), seats=(1, 1), silent=silent, types=(SOLID, wide), target=3)
    assert (target_of(lost, decide(lost).actions), bought(decide(lost).actions)) == (3, {})


def test_i8_while_the_target_is_held_on_demand_is_not_left_and_zones_that_failed_are_not_tried() -> None:
    """Each try would be a replica more that is held, and made up for on demand when it fails."""
    there = [node(number, SOLID, "us-1a") for number in (1, 2, 3, 4)]
    failed = tuple(Pool("gpu.spot", zone, 3, NOW_S - 1.0, "no stock") for zone in SPOT.zones)
    for known in (worth(4, 4, is_sure=False), worth(6, 4, is_sure=False)):
        seen = snapshot(known, *there, pools=failed)
        assert (target_of(seen, decide(seen).actions), bought(decide(seen).actions)) == (4, {})
    open_again = snapshot(worth(4, 4, is_sure=False), *there)
    assert bought(decide(open_again).actions) == {}
    rush = snapshot(worth(6, 4, is_sure=False), *there)
    assert (target_of(rush, decide(rush).actions), sum(bought(decide(rush).actions).values())) == (6, 2)
    lost = snapshot(worth(1, 1, is_sure=False), *there[:3], pools=failed, target=4)
    assert bought(decide(lost).actions) == {("gpu", "us-1a"): 1}
    many = snapshot(worth(1, 1, is_sure=False), *there, pools=failed, target=12)
    assert target_of(many, decide(many).actions) == SPEC.replicas.max


def test_while_no_replica_answers_none_is_given_up() -> None:
    starting = tuple(node(number, SPOT, "us-1a", NodeState.LAUNCHING) for number in (1, 2, 3))
    seen = snapshot(worth(1, 1), *starting, target=3)
    plan = decide(seen)
    assert target_of(seen, plan.actions) == 3
    assert any(
        isinstance(a, Wait) and a.constraint == "signal" and "no replica answers" in a.reason for a in plan.actions
    )


def test_a_type_keeps_its_least_nodes_and_only_the_target_falls() -> None:
    least = SPOT.model_copy(update={"min_nodes": 3})
    there = [node(number, least, zone) for number, zone in enumerate(("us-1a", "us-1b", "eu-1a", "eu-1a"), start=1)]
    seen = snapshot(worth(2, 2), *there, types=(SOLID, least))
    plan = decide(seen)
    assert (target_of(seen, plan.actions), len(drained(plan.actions))) == (2, 1)
    own = snapshot(worth(2, 2), *there[:3], types=(SOLID, least))
    assert (target_of(own, decide(own).actions), drained(decide(own).actions)) == (2, [])


def test_all_that_leave_nodes_of_a_type_in_one_decision_leave_its_least_between_them() -> None:
    def left(min_nodes: int) -> int:
        """Uses six nodes: an endpoint that needs two has three, another that needs one has two, and one is idle."""
        least = SPOT.model_copy(update={"min_nodes": min_nodes})
        places = zip(range(1, 7), ("us-1a", "us-1b", "eu-1a") * 2, (1, 1, 1, 1, 1, 0), strict=True)
        *used, free = (node(number, least, zone, used=here) for number, zone, here in places)
        first = snapshot(worth(2, 2), *used, replace(free, idle_s=1000.0), seats=(1, 2, 3), types=(SOLID, least))
        (one,) = first.endpoints
        (two,) = snapshot(worth(1, 1), *used, seats=(4, 5), types=(SOLID, least)).endpoints
        two = replace(two, endpoint=replace(two.endpoint, spec=SPEC.model_copy(update={"name": "n"})))
        return len(first.nodes) - len(drained(decide(replace(first, endpoints=(one, two))).actions))

    assert [left(min_nodes) for min_nodes in (0, 3, 4, 5, 6)] == [3, 3, 4, 5, 6]


def test_zones_share_the_maximum_of_their_type_and_what_is_lacking_is_bought_on_demand() -> None:
    few = SPOT.model_copy(update={"max_nodes": 2})
    seen = snapshot(worth(6, 5), node(1, SOLID, "us-1a"), types=(SOLID, few))
    plan = decide(seen)
    assert sum(count for (name, _), count in bought(plan.actions).items() if name == "gpu.spot") == 2
    assert bought(plan.actions)["gpu", "us-1a"] == 2
    assert target_of(seen, plan.actions) == 5
    wide = few.model_copy(update={"resources": {"GPU": 2}})
    pairs = snapshot(worth(6, 5), node(1, SOLID, "us-1a"), types=(SOLID, wide))
    assert sum(count for (name, _), count in bought(decide(pairs).actions).items() if name == "gpu.spot") == 2
    assert target_of(pairs, decide(pairs).actions) == 5


def test_zones_share_the_limit_of_what_the_fleet_may_cost() -> None:
    seen = replace(snapshot(worth(6, 1), types=(SOLID, SPOT), target=1), limits=Limits(hard_micro_usd_h=2_500_000))
    plan = decide(seen)
    assert (target_of(seen, plan.actions), sum(bought(plan.actions).values())) == (2, 2)


def test_replicas_on_a_node_type_that_is_in_the_configuration_no_more_count_and_go_like_others() -> None:
    there = [node(1, SOLID, "us-1a"), *(node(number, SPOT, "us-1b") for number in (2, 3, 4))]
    seen = snapshot(worth(2, 2), *there, types=(SOLID,))
    assert len(drained(decide(seen).actions)) == 2 and target_of(seen, decide(seen).actions) == 2
    lost = snapshot(worth(3, 3), *there[:2], types=(SOLID,))
    assert bought(decide(lost).actions) == {("gpu", "us-1a"): 1}


FAST = SPOT.model_copy(
    update={
        "name": "fast.spot",
        "labels": {"ray.io/accelerator-type": "H100"},
        "price_micro_usd_h": 2_400_000,
        "zones": ("us-1a", "us-1b"),
    }
)
PACES = Traffic(speed=SPEED, paces={"gpu": 1.0, "gpu.spot": 1.0, "fast.spot": 3.0}, next_pace=3.0)


def on_two_kinds(known: ReplicaValue, *nodes: NodeView, traffic: Traffic = PACES, spec: ServeSpec = SPEC) -> Snapshot:
    seen = snapshot(known, *nodes, types=(SOLID, SPOT, FAST))
    (view,) = seen.endpoints
    assert view.load is not None
    load = replace(view.load, traffic=traffic)
    return replace(seen, endpoints=(replace(view, load=load, endpoint=replace(view.endpoint, spec=spec)),))


def test_spot_is_bought_where_what_a_replica_does_costs_least_not_where_its_hour_does() -> None:
    seen = on_two_kinds(worth(6, 1))
    assert {name for name, _ in bought(decide(seen).actions)} == {"fast.spot"}
    assert target_of(seen, decide(seen).actions) == 2  # each does as much as three
    alike = on_two_kinds(worth(6, 1), traffic=Traffic(speed=SPEED))
    assert {name for name, _ in bought(decide(alike).actions)} == {"gpu.spot"}
    assert target_of(alike, decide(alike).actions) == 6


def test_types_on_which_first_tokens_are_late_are_not_bought_however_cheap() -> None:
    seen = on_two_kinds(worth(2, 1), traffic=replace(PACES, paces={}, too_slow=("gpu.spot", "gpu")))
    assert {name for name, _ in bought(decide(seen).actions)} == {"fast.spot"}


def test_a_fast_replica_replaces_as_many_slow_ones_as_it_does_the_work_of() -> None:
    fast, slow = node(1, FAST, "us-1a"), [node(number, SPOT, "us-1b") for number in (2, 3, 4)]
    plan = decide(on_two_kinds(worth(4, 2), fast, *slow)).actions
    assert len(drained(plan)) == 2 and "node-1" not in drained(plan)
    assert drained(decide(on_two_kinds(worth(6, 2), fast, *slow)).actions) == []


def test_there_are_never_fewer_replicas_than_the_minimum_however_fast_one_is() -> None:
    two = SPEC.model_copy(update={"replicas": SPEC.replicas.model_copy(update={"min": 2})})
    seen = on_two_kinds(worth(2, 2), spec=two)
    assert target_of(seen, decide(seen).actions) == 2 == sum(bought(decide(seen).actions).values())


def test_the_reason_says_how_long_a_start_takes_and_how_that_is_known() -> None:
    seen = snapshot(worth(3, 1))
    (scale,) = (action for action in decide(seen).actions if isinstance(action, Scale))
    assert scale.reason.endswith("a start takes 30 s, as configured")
    known = on_two_kinds(worth(3, 1), traffic=Traffic(speed=SPEED, cold_start_s=140.0))
    (scale,) = (action for action in decide(known).actions if isinstance(action, Scale))
    assert scale.reason.endswith("a start takes 140 s, as learned from its own")


def aimed(seen: Snapshot, target: int) -> Snapshot:
    (view,) = seen.endpoints
    endpoint = replace(view.endpoint, target_replicas=target)
    return replace(seen, endpoints=(replace(view, endpoint=endpoint),))


@pytest.mark.parametrize("next_pace", [1.0, 3.0])
def test_a_target_that_is_held_while_slower_replicas_come_does_not_grow(next_pace: float) -> None:
    there = node(1, FAST, "us-1a"), node(2, SPOT, "us-1b", NodeState.LAUNCHING)
    traffic = replace(PACES, next_pace=next_pace)
    seen = aimed(on_two_kinds(worth(4, 3, is_sure=False), *there, traffic=traffic), 2)
    assert (target_of(seen, decide(seen).actions), bought(decide(seen).actions)) == (2, Counter())


def test_a_minimum_that_cannot_be_bought_is_asked_for_and_no_more() -> None:
    none = tuple(node_type.model_copy(update={"max_nodes": 0}) for node_type in (SOLID, SPOT, FAST))
    two = SPEC.model_copy(update={"replicas": SPEC.replicas.model_copy(update={"min": 2})})
    seen = on_two_kinds(worth(1, 1), traffic=replace(PACES, next_pace=1.0), spec=two)
    assert target_of(seen, decide(replace(seen, node_types=none)).actions) == 2


def test_slow_replicas_on_demand_are_never_more_than_the_maximum_however_many_would_be_worth_it() -> None:
    much = replace(worth(20, 20), late_per_h=tuple(9000.0 / 2**count for count in range(49)))
    slow = [node(number, SOLID, "us-1a") for number in range(1, 9)]
    seen = replace(on_two_kinds(much, *slow, traffic=replace(PACES, next_pace=1.0)), node_types=(SOLID,))
    assert (target_of(seen, decide(seen).actions), bought(decide(seen).actions)) == (8, Counter())
    spot = on_two_kinds(much, *slow)
    assert target_of(spot, decide(spot).actions) > 8  # what replaces them comes before they go


@settings(max_examples=60, deadline=None)
@given(
    counts=st.tuples(st.integers(1, 8), st.integers(1, 8)).map(lambda both: (max(both), min(both))),
    held=st.lists(st.sampled_from([SPOT, FAST, SOLID]), min_size=1, max_size=6),
    is_sure=st.booleans(),
)
def test_mixed_replicas_that_stay_do_what_is_worth_it_on_demand(
    counts: tuple[int, int], held: list[NodeType], is_sure: bool
) -> None:
    nodes = [node(number, node_type, "us-1a") for number, node_type in enumerate(held, start=1)]
    seen = on_two_kinds(worth(*counts, is_sure=is_sure), *nodes)
    actions = decide(seen).actions
    gone = set(drained(actions))
    work = sum(PACES.paces[n.node.type] for n in nodes if n.node.id not in gone)
    before = sum(PACES.paces[n.node.type] for n in nodes)
    assert work >= min(before, counts[1])
    assert is_sure or not gone
    target = target_of(seen, actions)
    assert target >= len(nodes) - len(gone) if is_sure else target >= min(len(nodes), 8)
    assert decide(seen) == decide(seen)


def test_an_slo_without_a_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="slo_target needs slo_ttft_s"):
        Replicas.parse({"slo_target": 0.9}, where="spec")


@settings(max_examples=40, deadline=None)
@given(
    counts=st.tuples(st.integers(1, 8), st.integers(1, 8)).map(lambda both: (max(both), min(both))),
    there=st.lists(
        st.tuples(st.sampled_from([SOLID, SPOT]), st.sampled_from([NodeState.READY, NodeState.LAUNCHING])), max_size=8
    ),
    silent=st.integers(0, 1),
)
def test_what_was_published_needs_no_second_word_and_never_falls_below_what_on_demand_is_worth(
    counts: tuple[int, int], there: list[tuple[NodeType, NodeState]], silent: int
) -> None:
    nodes = tuple(node(number, kind, "us-1a", state) for number, (kind, state) in enumerate(there, start=1))
    seen = snapshot(worth(*counts), *nodes, silent=silent, target=max(1, len(nodes)))
    published, scales = targets.set_targets(seen)
    again, nothing = targets.set_targets(published)
    assert nothing == () and again.endpoints[0].endpoint == published.endpoints[0].endpoint
    assert published.endpoints[0].endpoint.target_replicas >= counts[1]
    assert decide(seen) == decide(seen)
    if silent and any(state is NodeState.READY for _, state in there):
        assert all(scale.replicas >= len(nodes) for scale in scales)


class Serving(Cluster):
    """Its replicas count what they answer, each request with a prefill of a second."""

    rps = 2.0
    spoke_s = 0.0
    counted = 0.0

    def _replicas_speak(self) -> None:
        super()._replicas_speak()
        now_s = self.clock.now_s()
        self.counted += self.rps * (now_s - self.spoke_s) if self.spoke_s else 0.0
        self.spoke_s = now_s
        load = self.loads["m"]
        counters = Counters(self.counted, 1500.0 * self.counted, 10.0 * self.counted, finished=self.counted)
        told = tuple(replace(r, counters=counters if not at else Counters()) for at, r in enumerate(load.replicas))
        self.loads["m"] = replace(load, replicas=told, traffic=Traffic(speed=SPEED))

    def on(self) -> Counter[tuple[str, str]]:
        """Replicas by pool."""
        pools = {m.node_id: (m.node_type, m.zone) for m in self.machines()}
        return Counter(pools[work.node_id] for work in self.ray.work if work.node_id in pools)

    def pass_by(self, seconds: float) -> list[Action]:
        return self.settle(int(seconds / 4.0), 4.0)

    def lose(self, zone: str) -> None:
        """All of its spot, and there is no more."""
        self.provider.set_stock("gpu.spot", zone, 0)
        for machine in self.machines():
            if (machine.node_type, machine.zone) == ("gpu.spot", zone):
                self.provider.reclaim(machine.node_id)


PAIR = SOLID.model_copy(update={"resources": {"GPU": 2}, "max_nodes": 3, "price_micro_usd_h": 6_000_000})
PAIR_SPOT = SPOT.model_copy(update={"resources": {"GPU": 2}, "max_nodes": 5, "price_micro_usd_h": 2_000_000})


class SpotComesAndGoes(RuleBasedStateMachine):
    """An endpoint with an SLO for hours, two replicas on a node: it keeps the promises that every plan keeps."""

    @initialize()
    def start(self) -> None:
        self.world = Serving((PAIR, PAIR_SPOT, SOLID), watch=promises.check)
        self.world.serve(SPEC)
        self._minutes(5)

    @rule(rps=st.sampled_from([0.0, 0.5, 2.0, 4.0]))
    def requests(self, rps: float) -> None:
        self.world.rps = rps
        self._minutes(15)

    @rule(zone=st.sampled_from(SPOT.zones), nodes=st.sampled_from([0, 1, None]))
    def stock(self, zone: str, nodes: int | None) -> None:
        self.world.provider.set_stock("gpu.spot", zone, nodes)
        self._minutes(3)

    @rule(data=st.data(), notice_s=st.sampled_from([0.0, 120.0]))
    def notice(self, data: st.DataObject, notice_s: float) -> None:
        if spot := [machine for machine in self.world.machines() if machine.node_type == "gpu.spot"]:
            self.world.provider.give_notice(data.draw(st.sampled_from(spot)).node_id, notice_s)
        self._minutes(3)

    @rule(point=st.sampled_from(CRASH_POINTS), calls=st.integers(0, 5))
    def crash(self, point: CrashPoint, calls: int) -> None:
        self.world.tick(1.0, crash=point, crash_in=calls)

    @rule(gpus=st.sampled_from([0.0, 1.0]))
    def a_task_shares_a_node_or_none_does(self, gpus: float) -> None:
        self.world.ray.work = [work for work in self.world.ray.work if work.endpoint]
        if gpus:
            self.world.run_task({"GPU": gpus})
        self._minutes(3)

    def teardown(self) -> None:
        """Spot is back for good, and as many answer as are worth it, on spot or beside others; then nothing is done."""
        if not hasattr(self, "world"):
            return
        for zone in SPOT.zones:
            self.world.provider.set_stock("gpu.spot", zone, None)
        self.world.ray.work = [work for work in self.world.ray.work if work.endpoint]
        self.world.rps = 2.0
        self._minutes(90)
        assert {name for name, _ in self.world.on()} == {"gpu.spot"}
        (view,) = self.world.seen.endpoints
        assert view.worth is not None
        assert view.worth.ondemand <= sum(self.world.on().values()) <= view.worth.spot + 1
        self.world.check_no_leak()

    def _minutes(self, minutes: int) -> None:
        for _ in range(3 * minutes):
            self.world.tick(20.0)


TestSpotComesAndGoes = SpotComesAndGoes.TestCase
TestSpotComesAndGoes.settings = settings(max_examples=2, stateful_step_count=6, deadline=None)


def test_a_lost_zone_is_replaced_in_others_and_spot_that_is_gone_on_demand_until_it_is_back() -> None:
    world = Serving((SOLID, SPOT))
    world.serve(SPEC)
    world.pass_by(2 * MEMORY_S)
    calm = world.on()
    assert sum(calm.values()) >= 3 and {name for name, _ in calm} == {"gpu.spot"} and len(calm) > 1
    lost = max(calm, key=lambda pool: (calm[pool], pool))[1]
    world.lose(lost)
    world.pass_by(120.0)
    assert sum(world.on().values()) >= 3
    assert {name for name, _ in world.on()} == {"gpu.spot"} and lost not in {zone for _, zone in world.on()}
    for zone in SPOT.zones:
        world.lose(zone)
    world.pass_by(120.0)
    assert {name for name, _ in world.on()} == {"gpu"} and sum(world.on().values()) >= 2
    for zone in SPOT.zones:
        world.provider.set_stock("gpu.spot", zone, None)
    fewest = min(_replicas_after(world, 4.0) for _ in range(250))
    assert fewest >= 2  # nobody left before those who replace them answered
    assert {name for name, _ in world.on()} == {"gpu.spot"}
    assert {machine.node_type for machine in world.machines()} == {"gpu.spot"}


def _replicas_after(world: Serving, seconds: float) -> int:
    world.tick(seconds)
    return sum(world.on().values())
