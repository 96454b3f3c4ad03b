"""The states of a rollout, the replicas of its revisions, and the routes of gateways."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.specs.rollout import CountedRevision, Rollout, RolloutState, Serving, application_of, endpoint_of
from raytide.registry.rollout.lifecycle import (
    GRACE_S,
    RolloutView,
    advance,
    advance_all,
    intervals,
    judged_by,
    losing_endpoints,
    proven_regressions,
    with_shares,
)
from raytide.registry.rollout.routes import routes
from raytide.registry.rollout.spec import RolloutSpec

PLAN = RolloutSpec.model_validate(
    {
        "canary": {"steps": [{"percent": 50, "for_s": 1, "requests": 10}, {"percent": 100, "for_s": 1, "requests": 5}]},
        "ready_within_s": 60,
    }
).model_dump(mode="json")


def rollout(**changes: Any) -> Rollout:
    begun = Rollout(3, "web", "blue", "ana", "canary", PLAN, 1, 2, "web", "web~2", created_at_s=100.0)
    return replace(begun, **changes)


def endpoint(name: str, state: EndpointState = EndpointState.RUNNING, **replicas: Any) -> Endpoint:
    spec = ServeSpec(name=name, model="/m", replicas=Replicas(**replicas))
    return Endpoint(spec, "ana", state, 0.0, spec.replicas.min)


def view(ready: int = 1, counts: dict[int, CountedRevision] | None = None, **changes: Any) -> RolloutView:
    return replace(RolloutView(endpoint("web"), endpoint("web~2"), ready, counts or {}), **changes)


def counts(champion: tuple[int, int], challenger: tuple[int, int]) -> dict[int, CountedRevision]:
    both = ((1, champion), (2, challenger))
    return {
        revision: CountedRevision(rollout=3, revision=revision, requests=requests, errors=errors, started=requests)
        for revision, (requests, errors) in both
    }


def stored(found: Rollout) -> Rollout:
    """Returns it as a new controller reads it."""
    return replace(found, progress=json.loads(json.dumps(found.progress)), plan=json.loads(json.dumps(found.plan)))


def test_a_good_challenger_passes_its_steps_and_serves_alone() -> None:
    found = advance(rollout(), view(ready=0), 101.0)
    assert found.state is RolloutState.STARTING
    found = advance(found, view(), 102.0)
    assert (found.state, found.percent) == (RolloutState.RUNNING, 50.0)
    found = stored(advance(found, view(counts=counts((10, 0), (9, 0))), 104.0))
    assert found.percent == 50.0
    assert "1 requests" in found.reason
    found = stored(advance(found, view(counts=counts((12, 0), (10, 0))), 105.0))
    assert found.percent == 100.0
    wide = view(counts=counts((12, 0), (16, 0)), challenger=endpoint("web~2", min=2, max=2))
    found = stored(advance(found, wide, 107.0))
    assert found.state is RolloutState.RUNNING
    assert "1 of 2 replicas" in found.reason, "it waits until it has the replicas that the endpoint must have"
    found = advance(found, replace(wide, ready=2), 108.0)
    assert (found.state, found.percent, found.loser) == (RolloutState.PROMOTED, 100.0, "web")
    assert found.decided_at_s == 108.0


def test_a_challenger_that_fails_requests_is_rolled_back_and_a_count_that_is_seen_again_is_no_new_evidence() -> None:
    found = advance(rollout(), view(), 101.0)
    failing = view(counts=counts((100, 0), (2, 1)))
    for second in range(20):
        found = stored(advance(found, failing, 102.0 + second))
    assert found.state is RolloutState.RUNNING
    found = advance(found, view(counts=counts((140, 0), (30, 29))), 130.0)
    assert (found.state, found.percent, found.loser) == (RolloutState.ROLLED_BACK, 0.0, "web~2")
    assert "failed requests" in found.reason
    assert proven_regressions(stored(found)) == {"errors": pytest.approx(29 / 30, abs=0.05)}
    assert proven_regressions(replace(found, state=RolloutState.STOPPED)) == {}
    assert proven_regressions(replace(found, progress={"canary": {"of": "another release"}})) == {}


@pytest.mark.parametrize(
    ("seen", "state", "because"),
    [
        (view(ready=0, challenger=endpoint("web~2", EndpointState.FAILED)), "rolled_back", "failed"),
        (view(ready=0, challenger=endpoint("web~2", EndpointState.DEPLOYING)), "rolled_back", "within 60 s"),
        (view(challenger=None), "rolled_back", "deleted"),
        (view(champion=endpoint("web", EndpointState.DELETING)), "stopped", "the endpoint was deleted"),
    ],
)
def test_what_ends_a_rollout_before_it_has_begun(seen: RolloutView, state: str, because: str) -> None:
    found = advance(rollout(), seen, 161.0)
    assert found.state == state
    assert because in found.reason


def test_a_plan_that_this_release_rejects_is_rolled_back() -> None:
    found = advance(rollout(plan={"canary": {"pace": 3}}), view(), 101.0)
    assert (found.state, "cannot be read" in found.reason) == (RolloutState.ROLLED_BACK, True)


def test_users_end_a_rollout() -> None:
    running = advance(rollout(), view(), 101.0)
    stopped = advance(replace(running, asked="stop", asked_by="bo", asked_why="it rhymes"), view(), 102.0)
    assert (stopped.state, stopped.reason) == (RolloutState.STOPPED, "asked for by bo: it rhymes")
    promoted = advance(replace(running, asked="promote", asked_by="bo"), view(), 102.0)
    assert promoted.state is RolloutState.PROMOTED
    waits = advance(replace(running, asked="promote", asked_by="bo"), view(ready=0), 102.0)
    assert (waits.state, waits.percent) == (RolloutState.RUNNING, 100.0)


def test_the_application_that_lost_ends_after_a_grace_period_and_then_the_rollout_has_ended() -> None:
    decided = rollout(state=RolloutState.PROMOTED, decided_at_s=200.0)
    both = {name: endpoint(name) for name in ("web", "web~2")}
    assert losing_endpoints([decided], both, 200.0 + GRACE_S / 2) == {}
    losers = losing_endpoints([decided], both, 200.0 + GRACE_S)
    assert {name: each.state for name, each in losers.items()} == {"web": EndpointState.DELETING}
    assert losing_endpoints([decided], both | losers, 210.0) == {}
    assert advance_all([decided], both, {}, {}, 210.0)[3].ended_at_s is None
    assert advance_all([decided], {"web~2": both["web~2"]}, {}, {}, 220.0)[3].ended_at_s == 220.0


def test_a_route_names_the_challenger_while_it_runs_and_serves_it_once_it_is_promoted() -> None:
    serving = {"web": Serving("web", "web", 1)}
    running = rollout(state=RolloutState.RUNNING, percent=25.0)
    route = routes(serving, [running])["web"]
    assert route.rollout is not None
    assert (route.application, route.rollout.challenger, route.rollout.split.percent) == ("web", "web~2", 25.0)
    promoted = routes(serving, [rollout(state=RolloutState.PROMOTED)])["web"]
    assert (promoted.application, promoted.revision, promoted.rollout) == ("web~2", 2, None)
    later = routes({"web": Serving("web", "web~2", 5, 2)}, [rollout(state=RolloutState.PROMOTED)])["web"]
    assert (later.application, later.revision) == ("web~2", 5)
    assert routes(serving, [rollout(state=RolloutState.ROLLED_BACK)])["web"].application == "web"


@given(st.integers(1, 20), st.integers(0, 20), st.sampled_from([0.0, 5.0, 25.0, 50.0, 100.0]), st.data())
def test_both_revisions_together_may_have_one_replica_more_than_the_endpoint(
    most: int, least: int, percent: float, data: st.DataObject
) -> None:
    least = min(least, most)
    target = data.draw(st.integers(max(1, least), most), "the champion's target")
    ready = data.draw(st.integers(0, most + 1 - target), "the challenger's ready replicas")
    champion = replace(endpoint("web", min=least, max=most), target_replicas=target)
    challenger = replace(endpoint("web~2", min=least, max=most), target_replicas=max(1, ready))
    loads = {"web~2": EndpointLoad(0.0, 0.0, ready)}
    found = with_shares(
        {"web": champion, "web~2": challenger}, [rollout(state=RolloutState.RUNNING, percent=percent)], loads
    )
    bounds = {name: each.spec.replicas for name, each in found.items()}
    assert bounds["web~2"].max <= max(1, most + 1 - target)
    kept = min(target, most) - (1 if percent == 100.0 else 0)
    assert bounds["web"].max >= kept, "it keeps what it has until the challenger takes over, one by one"
    assert bounds["web~2"].max + target <= most + 1
    assert 1 <= bounds["web~2"].min <= bounds["web~2"].max
    assert min(1, least) <= bounds["web"].min <= bounds["web"].max
    assert found["web"].spec.name == "web"


def test_a_shadow_gets_copies_alone_until_a_user_ends_it() -> None:
    plan = RolloutSpec.model_validate({"shadow": {"percent": 40}}).model_dump(mode="json")
    found = advance(rollout(kind="shadow", plan=plan), view(), 101.0)
    assert (found.state, found.percent) == (RolloutState.RUNNING, 0.0)
    found = advance(found, view(counts=counts((500, 0), (500, 500))), 1e6)
    assert found.state is RolloutState.RUNNING, "its failures hurt nobody"
    assert found.progress["seen"]["challenger"]["errors"] == 500
    route = routes({"web": Serving("web", "web", 1)}, [found])["web"].rollout
    assert route is not None
    assert (route.split.percent, route.split.shadow_percent) == (0.0, 40.0)
    both = {name: endpoint(name, min=4, max=8) for name in ("web", "web~2")}
    shared = with_shares(both, [found], {})
    assert (shared["web"].spec.replicas.min, shared["web~2"].spec.replicas.min) == (4, 2)
    promoted = advance(replace(found, asked="promote"), view(), 1e6)
    assert promoted.state is RolloutState.PROMOTED
    waits = advance(replace(found, asked="promote"), view(challenger=both["web~2"]), 1e6)
    assert (waits.state, waits.percent) == (RolloutState.RUNNING, 100.0)
    shared = with_shares({**both, "web": replace(both["web"], target_replicas=1)}, [waits], {})
    assert shared["web~2"].spec.replicas.min == 4, "it gets the replicas for which its promotion waits"


def test_other_endpoints_and_rollouts_that_are_over_leave_the_bounds_alone() -> None:
    both = {name: endpoint(name, min=4, max=8) for name in ("web", "web~2")}
    shared = with_shares(both, [rollout(state=RolloutState.PROMOTED)], {})
    assert shared["web~2"] == both["web~2"]
    loser = replace(both["web"], target_replicas=2)
    kept = with_shares({**both, "web": loser}, [rollout(state=RolloutState.PROMOTED)], {})["web"].spec.replicas
    assert (kept.min, kept.max) == (1, 2), "it gets no replicas back before it drains"
    idle = endpoint("web", min=0, max=8)
    kept = with_shares({**both, "web": idle}, [rollout(state=RolloutState.PROMOTED)], {})["web"].spec.replicas
    assert kept.min == 0, "no node is bought for an application that ends"
    assert with_shares({"other": both["web"]}, [rollout()], {}) == {"other": both["web"]}


def test_intervals_of_shares() -> None:
    found = intervals(CountedRevision(rollout=1, revision=1, requests=100, errors=10))
    mean, low, high = found["errors"]
    assert low < mean == 0.1 < high
    assert low > 0.04
    assert high < 0.19
    assert "late" not in found


def test_names_of_applications() -> None:
    assert application_of("web", 7) == "web~7"
    assert endpoint_of("web~7") == endpoint_of("web") == "web"
    with pytest.raises(ValueError, match="give one of"):
        RolloutSpec.model_validate({})


def test_an_a_b_test_says_which_revision_is_liked_better_and_leaves_the_end_to_a_user() -> None:
    plan = RolloutSpec.model_validate({"ab": {"percent": 30, "test": {"effect": 0.1}}}).model_dump(mode="json")
    found = advance(rollout(kind="ab", plan=plan), view(), 101.0)
    assert (found.state, found.percent) == (RolloutState.RUNNING, 30.0)
    route = routes({"web": Serving("web", "web", 1)}, [found])["web"].rollout
    assert route is not None
    assert route.by_key
    few = {1: dict.fromkeys(range(50), (3, 2)), 2: dict.fromkeys(range(50), (1, 1))}
    found = stored(advance(found, view(liked=few), 102.0))
    assert found.reason == "the champion has 150 of 200 requests"
    many = {1: {group: (40, 20 + group % 3) for group in range(100)}, 2: dict.fromkeys(range(100), (40, 30))}
    found = stored(advance(found, view(liked=many), 103.0))
    assert found.state is RolloutState.RUNNING
    assert found.reason.startswith("the challenger is liked better: +22.5% liked answers (+")
    assert None not in found.progress["test"].values()
    again = stored(advance(found, view(liked={}), 104.0))
    assert again.progress["test"]["winner"] == "b", "a declared winner stays"


def test_a_canary_goes_back_for_a_metric_that_its_rule_names_and_a_replaced_value_is_no_new_evidence() -> None:
    canary = {**PLAN["canary"], "metrics": {"accepted": {"below": 0.5}}}
    plan = RolloutSpec.model_validate({"canary": canary}).model_dump(mode="json")
    found = advance(rollout(plan=plan), view(), 101.0)
    same = view(counts=counts((100, 0), (2, 0)), bad_values={1: {"accepted": (100, 2)}, 2: {"accepted": (3, 2)}})
    for second in range(20):
        found = stored(advance(found, same, 102.0 + second))
    assert found.state is RolloutState.RUNNING
    worse = {1: {"accepted": (140, 3), "unnamed": (40, 40)}, 2: {"accepted": (40, 35)}}
    found = advance(found, replace(same, bad_values=worse), 130.0)
    assert found.state is RolloutState.ROLLED_BACK
    assert found.reason == "87.5% bad values of metric accepted in 40, against 2.1% of the champion"
    assert list(intervals(CountedRevision(rollout=3, revision=2), found.progress["metrics"]["challenger"])) == [
        "metric accepted"
    ]


def test_an_a_b_test_compares_the_means_of_a_users_metric() -> None:
    test = {"effect": 2.0, "better": "lower"}
    with pytest.raises(ValueError, match="a metric needs test"):
        RolloutSpec.model_validate({"ab": {"metric": "edits"}})
    plan = RolloutSpec.model_validate({"ab": {"metric": "edits", "test": test}}).model_dump(mode="json")
    found = advance(rollout(kind="ab", plan=plan), view(), 101.0)
    assert judged_by(found) == ("edits", {})
    edits = {
        revision: {group: (10, 10 * mean + group % 3) for group in range(40)} for revision, mean in ((1, 9.0), (2, 4.0))
    }
    found = stored(advance(found, view(liked=edits), 102.0))
    assert found.state is RolloutState.RUNNING
    assert found.reason.startswith("the challenger's edits is better: -5 edits (-5.")
    assert found.progress["test"]["winner"] == "b"


@pytest.mark.parametrize(
    ("kind", "spec", "ends"),
    [
        ("ab", {"ab": {"metric": "score", "test": {"effect": 1e200}}}, True),
        ("ab", {"ab": {"metric": "score", "test": {"effect": 1e-170}}}, True),
        ("canary", {"canary": {"alpha": 1e-20}}, False),
    ],
)
def test_numbers_that_cannot_be_compared_stop_no_other_rollout(kind: Any, spec: dict[str, Any], ends: bool) -> None:
    plan = RolloutSpec.model_validate(spec).model_dump(mode="json")
    names = {"number": 4, "name": "chat", "champion_application": "chat", "challenger_application": "chat~2"}
    odd = advance(rollout(kind=kind, plan=plan, **names), view(), 101.0)
    other = rollout(state=RolloutState.RUNNING, asked="stop", asked_by="ana")
    there = {name: endpoint(name) for name in ("web", "web~2", "chat", "chat~2")}
    liked = {4: {revision: {g: (10, 5.0 + g % 3) for g in range(100)} for revision in (1, 2)}}
    for second, seen in enumerate((counts((10, 0), (1, 0)), counts((10, 0), (2, 0)))):
        moved = advance_all([odd, other], there, {}, {4: seen}, 102.0 + second, liked)
        odd = moved[4]
        assert moved[3].state is RolloutState.STOPPED
    assert (odd.state is RolloutState.ROLLED_BACK) is ends
