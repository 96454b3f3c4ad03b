"""Rollouts in the store: what begins one, what gateways report, and what a controller's commit changes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from raytide.core.errors import ConflictError, NotFoundError
from raytide.core.objects.api_key import HostedBackend
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.core.specs.rollout import Rollout, RolloutReport, RolloutState, Serving
from raytide.core.state import Changes, Store
from raytide.core.state.registry.rollouts import commit_rollouts
from raytide.core.state.tenancy.audit import acting


def spec(model: str = "/m/1", team: str = "blue") -> ServeSpec:
    return ServeSpec(name="chat", model=model, team=team, replicas=Replicas(min=3, max=4))


def begun(store: Store) -> Rollout:
    store.save_endpoint(spec(), "ana", 1.0)
    return store.rollouts.start(spec("/m/2"), "canary", {"canary": {}}, "bob", 5.0, "faster")


def decided(store: Store, state: RolloutState, at_s: float = 9.0) -> Rollout:
    (rollout,) = store.load().rollouts
    after = replace(rollout, state=state, reason="all steps passed", decided_at_s=at_s)
    store.commit(Changes(at_s=at_s, rollouts=(after,)))
    return after


def test_a_challenger_is_an_application_of_its_own_with_one_replica(store: Store) -> None:
    with acting("bob", 5.0):
        rollout = begun(store)
    assert (rollout.champion, rollout.challenger, rollout.challenger_application) == (1, 2, "chat~2")
    records = store.load()
    assert [(e.name, e.target_replicas, e.spec.model) for e in records.endpoints] == [
        ("chat", 3, "/m/1"),
        ("chat~2", 1, "/m/2"),
    ]
    assert records.rollouts == (rollout,)
    assert records.serving == {"chat": Serving("chat", "chat", 1)}
    assert store.endpoint("chat").spec.model == "/m/1"
    assert [x.number for x in store.revisions.page("chat", team="blue")] == [2, 1]
    (entry,) = store.tenancy.audit.entries(action="rollout.start")
    assert (entry.actor, entry.object, entry.detail["why"]) == ("bob", "chat", "faster")


def test_a_hosted_api_takes_no_part_in_a_rollout(store: Store) -> None:
    """Gateways send it every request while it is the champion, and it never has a replica as a challenger."""
    backend = HostedBackend(base_url="https://api.example/v1", model="big")
    hosted = ServeSpec.model_validate({"name": "chat", "team": "blue", "backend": backend})
    for champion, challenger in ((hosted, spec()), (spec(), hosted)):
        store.save_endpoint(champion, "ana", 1.0)
        with pytest.raises(ConflictError, match="hosted API"):
            store.rollouts.start(challenger, "canary", {"canary": {}}, "bob", 5.0, "")
    assert store.load().rollouts == ()


def test_a_promoted_application_serves_the_endpoint_and_gets_its_next_specs(store: Store) -> None:
    begun(store)
    decided(store, RolloutState.PROMOTED)
    assert store.rollouts.serving("chat") == Serving("chat", "chat~2", 2, previous=1)
    assert store.endpoint("chat").spec.model == "/m/2"
    (entry,) = store.tenancy.audit.entries(action="rollout.promoted")
    assert (entry.actor, entry.detail["why"]) == ("raytide", "all steps passed")
    store.commit(Changes(at_s=10.0, rollouts=store.load().rollouts))
    assert len(store.tenancy.audit.entries(action="rollout.promoted")) == 1, "each change of state is one entry"
    store.save_endpoint(spec("/m/3"), "ana", 11.0)
    assert {e.name: e.spec.model for e in store.load().endpoints} == {"chat": "/m/1", "chat~2": "/m/3"}
    assert store.rollouts.serving("chat") == Serving("chat", "chat~2", 3, previous=2)
    second = store.rollouts.start(spec("/m/4"), "canary", {}, "bob", 12.0, "")
    assert (second.champion_application, second.challenger_application) == ("chat~2", "chat~4")


def during_promotion(store: Store, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Runs `act` while the controller commits the promotion of the challenger, and a change of the champion."""
    champion = replace(store.endpoint("chat"), target_replicas=2)
    (rollout,) = store.load().rollouts
    after = replace(rollout, state=RolloutState.PROMOTED, decided_at_s=9.0)
    with ThreadPoolExecutor(1) as threads:

        def commit(*args: Any) -> None:
            commit_rollouts(*args)
            acting = threads.submit(act)
            with suppress(TimeoutError):  # it waits for this commit
                acting.result(0.5)
            results.append(acting)

        results: list[Any] = []
        monkeypatch.setattr("raytide.core.state.store.commit_rollouts", commit)
        store.commit(Changes(at_s=9.0, endpoints=(champion,), rollouts=(after,)))
        results[0].result(30)


def test_a_spec_that_waits_for_a_promotion_goes_to_the_promoted_application(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the application that the rollout is about to delete would serve the endpoint again."""
    begun(store)
    during_promotion(store, monkeypatch, lambda: store.save_endpoint(spec("/m/3"), "ana", 9.0))
    assert store.rollouts.serving("chat") == Serving("chat", "chat~2", 3, previous=2)
    assert {e.name: e.spec.model for e in store.load().endpoints} == {"chat": "/m/1", "chat~2": "/m/3"}


def test_a_deletion_that_waits_for_a_promotion_ends_the_promoted_application(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(store)
    during_promotion(store, monkeypatch, lambda: store.request_delete("chat"))
    assert {e.name: e.state for e in store.load().endpoints}["chat~2"] is EndpointState.DELETING


def test_an_endpoint_with_a_promoted_application_is_deleted_and_begins_anew(store: Store) -> None:
    begun(store)
    decided(store, RolloutState.PROMOTED)
    store.request_delete("chat")
    assert {e.name: e.state for e in store.load().endpoints}["chat~2"] is EndpointState.DELETING
    with pytest.raises(ConflictError, match="being deleted"):
        store.save_endpoint(spec(), "ana", 12.0)
    gone = [replace(e, state=EndpointState.DELETED) for e in store.load().endpoints]
    store.commit(Changes(at_s=13.0, endpoints=tuple(gone)))
    store.save_endpoint(spec("/m/5"), "ana", 14.0)
    assert [e.name for e in store.load().endpoints] == ["chat"]
    assert store.rollouts.serving("chat").application == "chat"
    assert store.rollouts.serving("chat").revision == 3


def test_a_repeated_request_starts_one_rollout(store: Store) -> None:
    first = begun(store)
    again = store.rollouts.start(spec("/m/2"), "canary", {"canary": {}}, "bob", 6.0, "faster")
    assert again == first
    assert len(store.load().rollouts) == 1
    with pytest.raises(ConflictError, match="has a rollout of revision 2"):
        store.rollouts.start(spec("/m/2"), "canary", {"canary": {}}, "ana", 6.0, "faster")
    decided(store, RolloutState.ROLLED_BACK)
    assert store.rollouts.start(spec("/m/2"), "canary", {"canary": {}}, "bob", 12.0, "faster").number != first.number


def test_what_is_refused_while_a_rollout_runs(store: Store) -> None:
    with pytest.raises(NotFoundError, match="chat does not exist"):
        store.rollouts.start(spec(), "canary", {}, "bob", 1.0, "")
    begun(store)
    for again in (
        lambda: store.save_endpoint(spec("/m/3"), "ana", 6.0),
        lambda: store.rollouts.start(spec("/m/3"), "canary", {}, "bob", 6.0, ""),
    ):
        with pytest.raises(ConflictError, match="has a rollout of revision 2"):
            again()
    with pytest.raises(ConflictError, match="belongs to team blue"):
        store.rollouts.start(spec("/m/3", team="green"), "canary", {}, "bob", 6.0, "")
    store.request_delete("chat")
    assert {e.state for e in store.load().endpoints} == {EndpointState.DELETING}
    with pytest.raises(ConflictError, match="being deleted"):
        store.rollouts.start(spec("/m/3"), "canary", {}, "bob", 7.0, "")


def test_a_rollout_that_is_rolled_back_leaves_the_champion_and_the_next_one_is_another_revision(store: Store) -> None:
    first = begun(store)
    decided(store, RolloutState.ROLLED_BACK)
    assert store.rollouts.serving("chat") == Serving("chat", "chat", 1)
    second = store.rollouts.start(spec("/m/2"), "canary", {}, "bob", 12.0, "again")
    assert (second.challenger, second.challenger_application) == (3, "chat~3")
    assert [x.number for x in store.rollouts.page("chat", team="blue")] == [second.number, first.number]
    assert store.rollouts.page("chat", team="green") == ()


def test_a_request_for_the_end_is_kept_once_and_audited(store: Store) -> None:
    with acting("ana", 7.0):
        with pytest.raises(NotFoundError):
            store.rollouts.ask("chat", "stop", "ana", "")
        begun(store)
        asked = store.rollouts.ask("chat", "stop", "ana", "it rhymes")
        assert store.rollouts.ask("chat", "stop", "bob", "") == asked
    assert (asked.asked, asked.asked_by, asked.asked_why) == ("stop", "ana", "it rhymes")
    assert len(store.tenancy.audit.entries(action="rollout.stop")) == 1


def test_reports_are_totals_of_each_gateway_and_end_with_the_rollout(store: Store) -> None:
    number = begun(store).number

    def report(gateway: str, requests: int, errors: int = 0, rollout: int = number) -> None:
        counted = {"rollout": rollout, "revision": 2, "requests": requests, "errors": errors}
        store.rollouts.report(RolloutReport.model_validate({"gateway": gateway, "counted": [counted]}))

    report("g1", 5, 1)
    report("g1", 5, 1)
    report("g1", 9, 2)
    report("g1", 7, 1)
    report("g2", 1)
    report("g2", 100, rollout=77)
    found = store.rollouts.counts([number])[number]
    assert {revision: (c.requests, c.errors) for revision, c in found.items()} == {2: (10, 2)}
    after = decided(store, RolloutState.ROLLED_BACK)
    store.commit(Changes(at_s=20.0, rollouts=(replace(after, ended_at_s=20.0),)))
    assert store.load().rollouts == ()
    report("g1", 50)
    assert store.rollouts.counts([number]) == {number: {}}
