"""A team may hold its own quota and what others lend, never more than exists."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from tests.queue.cluster import team

from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.objects.snapshot import EndpointView
from raytide.core.objects.team import TeamSpec
from raytide.queue.admission.usage import replica_quota
from raytide.queue.quota import Quotas

NAMES = ("org", "blue", "red", "lab", "free")


def of(supply: float = 20.0, **specs: dict[str, object]) -> Quotas:
    return Quotas.of([team(name, **spec) for name, spec in specs.items()], {"GPU": supply})


def test_a_resource_that_no_team_names_has_no_limit() -> None:
    quotas = of(blue={"quota": {"H100": 4}})
    assert quotas.available("blue", "GPU") == math.inf
    assert quotas.lacking("blue", {"GPU": 1e9, "CPU": 5}) is None


def test_what_others_leave_may_be_borrowed_and_what_the_fleet_has_beyond_all_quotas() -> None:
    quotas = of(blue={"quota": {"GPU": 8}}, red={"quota": {"GPU": 4}})
    assert [quotas.available(name, "GPU") for name in ("blue", "red", "other")] == [20, 20, 20]
    quotas.reserve("red", {"GPU": 15})
    assert quotas.available("blue", "GPU") == 5
    assert quotas.borrows("red", ["GPU"])
    assert quotas.may_reclaim("blue", {"GPU": 8})
    assert not quotas.may_reclaim("blue", {"GPU": 9})
    assert not quotas.may_reclaim("other", {"GPU": 1}), "it has nothing of its own"


def test_every_member_of_a_replica_counts_those_without_a_node_too() -> None:
    spec = ServeSpec(name="m", model="/m", resources={"GPU": 8}, members=2)
    endpoint = Endpoint(spec, "me", EndpointState.RUNNING, 0.0, target_replicas=2)
    load = EndpointLoad(at_s=0.0, ongoing=0.0, ready=1, replica_nodes=("ray-1", "ray-2"))
    assert replica_quota(EndpointView(endpoint, load), {}) == {"GPU": 32}
    assert replica_quota(EndpointView(endpoint, None), {}) == {"GPU": 32}


def test_limits_of_borrowing_and_of_lending() -> None:
    quotas = of(8.0, blue={"quota": {"GPU": 5}, "lend": {"GPU": 2}}, red={"quota": {"GPU": 3}, "borrow": {"GPU": 1}})
    assert quotas.available("red", "GPU") == 4
    assert quotas.available("other", "GPU") == 5, "three of blue's it keeps for itself"
    quotas.reserve("other", {"GPU": 5})
    assert (quotas.available("blue", "GPU"), quotas.available("red", "GPU")) == (3, 0)


def test_what_cannot_be_preempted_may_not_borrow() -> None:
    quotas = of(blue={"quota": {"GPU": 4}})
    assert quotas.lacking("blue", {"GPU": 4}, is_preemptible=False) is None
    quotas.reserve("blue", {"GPU": 3}, is_preemptible=False)
    assert quotas.lacking("blue", {"GPU": 2}, is_preemptible=False) == "GPU"
    assert quotas.lacking("blue", {"GPU": 2}) is None
    assert quotas.lacking("blue", {"GPU": 2}, may_borrow=False) == "GPU"


def test_a_team_lives_within_what_its_parent_may() -> None:
    quotas = of(
        100.0,
        org={"quota": {"GPU": 2}, "borrow": {"GPU": 3}},
        blue={"parent": "org", "quota": {"GPU": 4}},
        red={"parent": "org"},
    )
    assert quotas.subtree_quota("org", "GPU") == 6
    assert quotas.available("red", "GPU") == 9
    quotas.reserve("red", {"GPU": 5})
    assert quotas.available("blue", "GPU") == 4
    assert quotas.may_reclaim("blue", {"GPU": 4})


limits = st.dictionaries(st.just("GPU"), st.integers(0, 12).map(float), max_size=1)
specs = st.builds(TeamSpec, quota=limits, borrow=limits, lend=limits)


@given(
    st.lists(specs, min_size=5, max_size=5),
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 6)), max_size=25),
    st.integers(0, 40),
)
def test_use_never_exceeds_all_quotas_and_giving_back_undoes_it(
    drawn: list[TeamSpec], wishes: list[tuple[str, int]], supply: int
) -> None:
    parents = {"blue": "org", "red": "org", "lab": "blue"}
    teams = [
        team(name, **{**spec.model_dump(), "parent": parents.get(name, "")})
        for name, spec in zip(NAMES, drawn, strict=True)
    ]
    quotas = Quotas.of(teams, {"GPU": float(supply)})
    if not quotas.limited:
        return
    promised = sum(one.spec.quota.get("GPU", 0.0) for one in teams)
    before = {name: quotas.available(name, "GPU") for name in NAMES}
    taken = []
    for name, amount in wishes:
        need = {"GPU": float(amount)}
        if quotas.lacking(name, need) is None:
            quotas.reserve(name, need)
            taken.append((name, need))
            assert all(quotas.available(other, "GPU") >= -1e-6 for other in ("", name))
    assert sum(need["GPU"] for _, need in taken) <= max(promised, supply) + 1e-6
    for name, need in reversed(taken):
        quotas.release(name, need)
    assert {name: quotas.available(name, "GPU") for name in NAMES} == before
