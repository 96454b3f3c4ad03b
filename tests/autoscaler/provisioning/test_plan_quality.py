"""I17: what the greedy plan buys costs little more than any fleet that could hold the work would."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from raytide.autoscaler.planner import plan
from raytide.core.objects.node import NodeType
from raytide.core.objects.plan import Launch, Wait
from raytide.core.objects.snapshot import Demand, Snapshot, Unmanaged

KINDS = ("CPU", "GPU", "memory")
MACHINES = {
    "cpu16": (16, 0, 64),
    "cpu64": (64, 0, 256),
    "highmem16": (16, 0, 256),
    "gpu1": (8, 1, 32),
    "gpu4": (48, 4, 192),
    "gpu8": (96, 8, 768),
}
USUAL_USD_H = {"cpu16": 0.8, "cpu64": 3.1, "highmem16": 1.3, "gpu1": 1.0, "gpu4": 5.0, "gpu8": 14.0}


def menu(factors: dict[str, float]) -> tuple[NodeType, ...]:
    return tuple(
        NodeType(
            name=name,
            resources=dict(zip(KINDS, amounts, strict=True)),
            price_micro_usd_h=int(USUAL_USD_H[name] * factors[name] * 1e6),
            max_nodes=100_000,
        )
        for name, amounts in MACHINES.items()
    )


tasks = st.builds(
    lambda cpu, memory_each, count: Demand({"CPU": cpu, "memory": cpu * memory_each}, count=count),
    st.sampled_from([1.0, 2.0, 4.0, 8.0]),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.integers(1, 400),
)
gpu_tasks = st.builds(
    lambda gpus, cpu_each, count: Demand({"GPU": gpus, "CPU": gpus * cpu_each, "memory": gpus * 16.0}, count=count),
    st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]),
    st.sampled_from([1.0, 4.0, 8.0]),
    st.integers(1, 200),
)


def bought(types: tuple[NodeType, ...], demand: list[Demand]) -> list[Launch]:
    snapshot = Snapshot(at_s=0, node_types=types, demand=tuple(demand), unmanaged=Unmanaged(10**6, gpu=True))
    actions = plan(snapshot)
    assert not any(isinstance(action, Wait) for action in actions)
    return [action for action in actions if isinstance(action, Launch)]


def bound_usd_h(types: tuple[NodeType, ...], demand: list[Demand]) -> float:
    """The relaxed problem: nodes may be bought in parts, and a member may sit on many."""
    pairs = [
        (s, t)
        for s, ask in enumerate(demand)
        for t, node in enumerate(types)
        if all(amount <= node.resources[name] for name, amount in ask.resources.items())
    ]
    cost = np.array([t.price_micro_usd_h / 1e6 for t in types] + [0.0] * len(pairs))
    holds: NDArray[np.float64] = np.zeros((len(types) * len(KINDS), len(cost)))
    seated: NDArray[np.float64] = np.zeros((len(demand), len(cost)))
    for t, node in enumerate(types):
        for k, name in enumerate(KINDS):
            holds[t * len(KINDS) + k, t] = -node.resources[name]
    for at, (s, t) in enumerate(pairs, start=len(types)):
        seated[s, at] = 1.0
        for k, name in enumerate(KINDS):
            holds[t * len(KINDS) + k, at] = demand[s].resources.get(name, 0.0)
    found = linprog(cost, A_ub=holds, b_ub=np.zeros(len(holds)), A_eq=seated, b_eq=[ask.count for ask in demand])
    return float(found.fun)


works = st.lists(st.one_of(tasks, gpu_tasks), min_size=1, max_size=10)
prices = st.fixed_dictionaries({name: st.floats(0.8, 1.25) for name in MACHINES})


@settings(max_examples=25, deadline=None)
@given(demand=works, factors=prices)
def test_i17_everything_is_held_for_little_more_than_the_bound(demand: list[Demand], factors: dict[str, float]) -> None:
    """The bound cuts nodes and members. A node may be nearly empty, and what is left of many nodes (7 of 8 CPUs, where
    members need 8) of no use: that came to 1.34 times the bound where no fleet is cheaper. The sum is the measure.
    """
    types = menu(factors)
    dearest = max(t.price_micro_usd_h for t in types) / 1e6
    assert cost_usd_h(types, demand) <= 1.35 * bound_usd_h(types, demand) + dearest


def test_i17_members_that_need_a_whole_node_s_cpus_are_held_at_the_least_cost() -> None:
    """58 nodes of one GPU for 115 halves, whose 7 free CPUs hold no member of 8, and CPU nodes for these."""
    demand = [
        Demand({"CPU": 8.0, "memory": 8.0}, count=54),
        Demand({"GPU": 0.5, "CPU": 0.5, "memory": 8.0}, count=115),
    ]
    assert cost_usd_h(menu(dict.fromkeys(MACHINES, 1.0)), demand) <= 58 * 1.0 + 27 * 0.8


def test_i17_over_many_fleets_the_plan_costs_at_most_5_percent_more_than_the_bound() -> None:
    """As a sum: what a single small fleet pays for whole nodes says nothing of the choice."""
    chance, paid, bound = random.Random(0), 0.0, 0.0
    for _ in range(60):
        types = menu({name: chance.uniform(0.8, 1.25) for name in MACHINES})
        demand = [random_work(chance) for _ in range(chance.randint(1, 10))]
        paid += cost_usd_h(types, demand)
        bound += bound_usd_h(types, demand)
    assert bound <= paid <= 1.05 * bound


def random_work(chance: random.Random) -> Demand:
    if chance.random() < 0.5:
        cpus = chance.choice([1.0, 2.0, 4.0, 8.0])
        return Demand({"CPU": cpus, "memory": cpus * chance.choice([1, 2, 4, 8])}, count=chance.randint(1, 400))
    gpus = chance.choice([0.5, 1.0, 2.0, 4.0, 8.0])
    cpus = gpus * chance.choice([1, 4, 8])
    return Demand({"GPU": gpus, "CPU": cpus, "memory": gpus * 16.0}, count=chance.randint(1, 200))


def cost_usd_h(types: tuple[NodeType, ...], demand: list[Demand]) -> float:
    return sum(launch.cost_micro_usd_h for launch in bought(types, demand)) / 1e6
