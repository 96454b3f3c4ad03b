"""Every plan keeps these promises, whatever the fleet is like: budgets, moves, capacity, silence, and repetition."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from raytide.autoscaler.disruption.consolidation_candidates import MOVE
from raytide.autoscaler.disruption.cost_limit import TOLERANCE
from raytide.autoscaler.endpoints.targets import set_targets
from raytide.control.reconcile.decide import decide
from raytide.core.objects.node import CapacityType, NodeState
from raytide.core.objects.plan import Action, Drain, Launch, Scale, Terminate
from raytide.core.objects.snapshot import Snapshot
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.state import SchedulingState


def check(seen: Snapshot, actions: Sequence[Action]) -> None:
    check_budget(seen, actions)
    check_silence(seen, actions)
    check_moves(seen, actions)
    check_capacity(seen, actions)
    check_shed(seen, actions)
    check_repeats(seen)
    check_more_load_wants_no_less(seen, actions)


def check_budget(seen: Snapshot, actions: Sequence[Action]) -> None:
    """I6: what is there and what is bought stay below the hard limit; what is no spot, below the soft one."""
    prices = {t.name: t for t in seen.node_types}
    burn = sum(view.node.price_micro_usd_h for view in seen.nodes)
    soft, hard = seen.limits.soft_micro_usd_h, seen.limits.hard_micro_usd_h
    now = {(quote.node_type, quote.zone): quote.price_micro_usd_h for quote in seen.quotes}
    for launch in (action for action in actions if isinstance(action, Launch)):
        known = now.get((launch.node_type, launch.zone))
        assert launch.cost_micro_usd_h == (prices[launch.node_type].price_in(launch.zone) if known is None else known)
        burn += launch.cost_micro_usd_h
        assert hard is None or burn <= hard, "I6"
        is_spot = prices[launch.node_type].market is CapacityType.SPOT
        assert soft is None or is_spot or burn <= soft, "I6"


def check_silence(seen: Snapshot, actions: Sequence[Action]) -> None:
    """I8: without fresh word nothing is taken away."""
    views = {view.endpoint.name: view for view in seen.endpoints}
    for action in actions:
        if isinstance(action, Scale):
            view = views[action.endpoint]
            is_fresh = view.load is not None and seen.at_s - view.load.at_s <= 10
            assert is_fresh or action.replicas >= view.endpoint.target_replicas, "I8"
        if isinstance(action, Terminate) and not seen.ray_answers:
            assert "deadline" in action.reason, "I8"
        if isinstance(action, Drain) and action.kind == "idle":
            view = next(view for view in seen.nodes if view.node.id == action.node_id)
            limits = next(t.busy_above for t in seen.node_types if t.name == view.node.type)
            words = [view.use.get(meter) for meter in limits]
            assert all(word is not None and seen.at_s - word.at_s <= 10 for word in words), "I8"
            assert all(word is not None and word.value <= limits[m] for m, word in view.use.items()), "I8"


def check_moves(seen: Snapshot, actions: Sequence[Action]) -> None:
    """I16: a move makes the fleet cheaper, and no young node moves."""
    nodes, shed = {view.node.id: view.node for view in seen.nodes}, _shed(seen, actions)
    youngest_s = seen.limits.moves_after_s
    assert youngest_s is not None
    coming = {v.node.subject: v.node for v in seen.nodes if v.node.state is NodeState.READY}
    given_up = {
        node_id for view in set_targets(seen)[0].endpoints for node_id in view.given_up
    }  # by the serving policy
    for action in actions:
        if isinstance(action, Drain) and action.node_id in given_up:
            continue
        if isinstance(action, Launch) and action.subject.startswith(MOVE):
            old = nodes[action.subject.removeprefix(MOVE)]
            assert action.cost_micro_usd_h < old.price_micro_usd_h, "I16"
            assert seen.at_s - (old.ready_at_s or seen.at_s) >= youngest_s, "I16"
        if isinstance(action, Drain) and action.node_id in shed:
            continue
        if isinstance(action, Drain) and action.kind == "notice" and nodes[action.node_id].state is NodeState.READY:
            old, new = nodes[action.node_id], coming.get(f"{MOVE}{action.node_id}")
            assert seen.at_s - (old.ready_at_s or seen.at_s) >= youngest_s, "I16"
            assert new is None or new.price_micro_usd_h < old.price_micro_usd_h, "I16"
            assert action.cost_micro_usd_h < 0 and action.rejected, "I16"


def check_capacity(seen: Snapshot, actions: Sequence[Action]) -> None:
    """I7: what is drained by choice leaves room, on nodes that are ready, for all replicas and members that have a node
    now; of an endpoint with an SLO, for as many as are worth it on demand."""
    leaving = {a.node_id for a in actions if isinstance(a, Drain) and a.deadline_s > seen.at_s} - _shed(seen, actions)
    given_up = {v.node.id for v in seen.nodes if v.node.id in leaving and v.node.state is NodeState.READY}
    if not given_up:
        return
    targets = {action.endpoint: action.replicas for action in actions if isinstance(action, Scale)}
    ready = {v.node.ray_node_id for v in seen.nodes if v.node.state is NodeState.READY}
    endpoints = []
    for view in seen.endpoints:
        seated = sum(node in ready for node in (view.load.replica_nodes if view.load else ()))
        target = min(
            seated // view.endpoint.spec.members, targets.get(view.endpoint.name, view.endpoint.target_replicas)
        )
        if view.worth is not None:  # what is only starting is more than is needed
            target = min(target, view.worth.ondemand)
        endpoints.append(replace(view, endpoint=replace(view.endpoint, target_replicas=target)))
    nodes = tuple(
        replace(v, node=replace(v.node, state=NodeState.DRAINING)) if v.node.id in given_up else v
        for v in seen.nodes
        if v.node.state is NodeState.READY
    )
    room = SchedulingState.from_snapshot(replace(seen, nodes=nodes, endpoints=tuple(endpoints)))
    for name, missing in room.missing.items():
        seats = room.replicas[name]
        assert len(seats) == missing and not any(seat.is_new for seat in seats), "I7"
    for lease in seen.leases:
        members = sum(member.node_id in given_up for member in lease.members)
        placed = room.place(lease.shape, members, subject="") if members else ()
        assert not isinstance(placed, Unschedulable) and not any(seat.is_new for seat in placed), "I7"


def check_shed(seen: Snapshot, actions: Sequence[Action]) -> None:
    """Checks that the hard limit costs no replica and no gang that may not be preempted, and no more than it takes."""
    shed, most = _shed(seen, actions), seen.limits.most_micro_usd_h
    if not shed:
        return
    leaving = (NodeState.DRAINING, NodeState.TERMINATING)
    price = {v.node.id: v.node.price_micro_usd_h for v in seen.nodes if v.node.state not in leaving}
    assert most is not None and sum(price.values()) > TOLERANCE * most
    left = sum(price.values()) - sum(price[node_id] for node_id in shed)
    assert left + max(price[node_id] for node_id in shed) > most
    fixed = {job.id for job in seen.jobs if not job.spec.is_preemptible}
    held = {m.node_id for lease in seen.leases if lease.job_id in fixed for m in lease.members if not m.gives_way}
    ids = {v.node.ray_node_id: v.node.id for v in seen.nodes}
    serving = {ids.get(node) for v in seen.endpoints for node in (v.load.replica_nodes if v.load else ())}
    assert not shed & (held | serving)


def _shed(seen: Snapshot, actions: Sequence[Action]) -> set[str]:
    """Nodes that go because the fleet costs too much."""
    ends = [action for action in actions if isinstance(action, Drain | Terminate)]
    return {action.node_id for action in ends if "above the hard limit" in action.reason and action.cost_micro_usd_h}


def check_repeats(seen: Snapshot) -> None:
    """I12: the same snapshot gives the same plan, to the byte, whoever asks and in whatever order dicts were filled."""
    again = deepcopy(seen)
    assert json.dumps(decide(seen).to_json()) == json.dumps(decide(again).to_json()), "I12"


def check_more_load_wants_no_less(seen: Snapshot, actions: Sequence[Action]) -> None:
    """I5: had there been more requests, no endpoint would get fewer replicas."""
    chance = random.Random(int(seen.at_s * 1000))
    more = tuple(
        replace(v, load=replace(v.load, ongoing=v.load.ongoing + chance.choice([0.5, 4.0, 40.0]))) if v.load else v
        for v in seen.endpoints
    )
    targets = {view.endpoint.name: view.endpoint.target_replicas for view in seen.endpoints}
    with_more = {**targets, **_scales(decide(replace(seen, endpoints=more)).actions)}
    for name, replicas in {**targets, **_scales(actions)}.items():
        assert with_more[name] >= replicas, "I5"


def _scales(actions: Sequence[Action]) -> dict[str, int]:
    return {action.endpoint: action.replicas for action in actions if isinstance(action, Scale)}
