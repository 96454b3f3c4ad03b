"""A rollout in the control loop, on a virtual clock: controllers are killed around their commits, and it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.control.test_controller import Killed, Loop

from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.specs.rollout import RolloutReport, RolloutState
from raytide.core.state import Changes
from raytide.registry.rollout.routes import EndpointRoute
from raytide.registry.rollout.spec import RolloutSpec

STEPS = [{"percent": 50, "for_s": 2, "requests": 10}, {"percent": 100, "for_s": 2, "requests": 10}]
SPEC = ServeSpec(name="web", model="/m/1", replicas=Replicas(min=2, max=2, downscale_delay_s=1), resources={"CPU": 2})


class Rollouts:
    """An endpoint with a rollout, whose requests a gateway counts, under controllers that may be killed."""

    def __init__(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = loop
        self.requests = 0
        self.kills: list[str] = []
        """The places where the controller is killed at its next commits: before, after, or none."""
        commit = loop.store.commit

        def mortal(changes: Changes) -> None:
            where = self.kills.pop(0) if self.kills else ""
            if where == "before":
                raise Killed
            commit(changes)
            if where == "after":
                raise Killed

        monkeypatch.setattr(loop.store, "commit", mortal)
        loop.store.save_endpoint(SPEC, "ana", loop.clock.now_s())
        self.until(lambda: len(loop.world.hosts("web")) == 2)

    def start(self) -> None:
        plan = RolloutSpec.model_validate({"canary": {"steps": STEPS}, "ready_within_s": 60}).model_dump(mode="json")
        spec = SPEC.model_copy(update={"model": "/m/2"})
        self.loop.store.rollouts.start(spec, "canary", plan, "ana", self.loop.clock.now_s(), "newer")

    def tick(self, errors: float = 0.0) -> None:
        """Lets some requests end, a share of the challenger's in errors, and runs a pass."""
        self.requests += 3
        for rollout in self.loop.store.load().rollouts:
            counted = [
                {"rollout": rollout.number, "revision": 1, "requests": self.requests},
                {"rollout": rollout.number, "revision": 2, "requests": self.requests,
                 "errors": int(self.requests * errors)},
            ]  # fmt: skip
            self.loop.store.rollouts.report(RolloutReport.model_validate({"gateway": "g", "counted": counted}))
        self.loop.tick()
        served = self.loop.controller._serve_sync._pass
        if served is not None:
            served.result(timeout=120)
        if (route := self.route()) is not None:
            assert route.application in self.loop.world.serving, "gateways always have somewhere to send requests"

    def until(self, done: object, errors: float = 0.0) -> None:
        assert callable(done)
        for _ in range(400):
            if done():
                return
            self.tick(errors)
        raise AssertionError("it did not happen in time")

    def route(self) -> EndpointRoute | None:
        found = self.loop.world.routes.get("web")
        return None if found is None else EndpointRoute.model_validate_json(found)

    def state(self) -> RolloutState:
        return self.loop.store.rollouts.page("web", team="default")[0].state


@pytest.fixture
def rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rollouts]:
    loop = Loop(tmp_path)
    yield Rollouts(loop, monkeypatch)
    loop.store.close()


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(kills=st.lists(st.sampled_from(["before", "after", "", ""]), max_size=40), broken=st.booleans())
def test_killed_around_any_commit_a_rollout_ends_with_one_application_that_serves(
    tmp_path_factory: pytest.TempPathFactory, kills: list[str], broken: bool
) -> None:
    loop = Loop(tmp_path_factory.mktemp("loop"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        rollouts = Rollouts(loop, monkeypatch)
        rollouts.start()
        rollouts.kills = list(kills)
        rollouts.until(lambda: not rollouts.state().is_live, errors=0.9 * broken)
        rollouts.until(lambda: len(loop.world.serving) == 1)
        rollouts.until(lambda: loop.store.load().rollouts == ())
    winner = "web" if broken else "web~2"
    assert rollouts.state() is (RolloutState.ROLLED_BACK if broken else RolloutState.PROMOTED)
    assert loop.world.serving == {winner: 2}
    route = rollouts.route()
    assert route is not None
    assert (route.application, route.rollout) == (winner, None)
    entries = loop.store.tenancy.audit.entries(object="web", action="rollout.")
    decided = [entry.action for entry in entries if "running" not in entry.action]
    assert decided == [f"rollout.{rollouts.state()}"], "one entry, however often a controller was killed"
    assert loop.store.endpoint("web").spec.model == ("/m/1" if broken else "/m/2")
    loop.check_ledger()
    loop.store.close()


def test_both_revisions_never_have_more_than_one_replica_more_than_the_endpoint(rollouts: Rollouts) -> None:
    rollouts.start()
    most = 0
    while rollouts.loop.store.load().rollouts:
        rollouts.tick()
        most = max(most, sum(e.target_replicas for e in rollouts.loop.store.load().endpoints))
        assert most <= 3
    assert most == 3
    subjects = {entry.subject for entry in rollouts.loop.store.books.entries()}
    assert "web~2" in subjects, "its cost is booked by its own name"


def test_a_user_stops_a_rollout_and_the_endpoint_takes_specs_again(rollouts: Rollouts) -> None:
    rollouts.start()
    rollouts.until(lambda: rollouts.state() is RolloutState.RUNNING)
    route = rollouts.route()
    assert route is not None
    assert route.rollout is not None
    assert route.rollout.split.percent == 50
    rollouts.loop.store.rollouts.ask("web", "stop", "bo", "it rhymes")
    rollouts.until(lambda: rollouts.state() is RolloutState.STOPPED)
    rollouts.loop.store.save_endpoint(SPEC.model_copy(update={"model": "/m/3"}), "ana", rollouts.loop.clock.now_s())
    rollouts.until(lambda: rollouts.loop.store.load().rollouts == ())
    assert rollouts.loop.world.serving == {"web": 2}


@pytest.mark.parametrize("ongoing", [0.0, 100.0])
def test_a_promotion_waits_for_the_replicas_that_the_endpoint_must_have(rollouts: Rollouts, ongoing: float) -> None:
    rollouts.loop.world.ongoing = ongoing
    rollouts.start()
    rollouts.until(lambda: rollouts.state() is RolloutState.RUNNING)
    rollouts.loop.store.rollouts.ask("web", "promote", "bo", "now")
    rollouts.until(lambda: rollouts.state() is RolloutState.PROMOTED)
    assert len(rollouts.loop.world.hosts("web~2")) == SPEC.replicas.min
