"""Serve's statuses become those of endpoints: only what Serve gave up for the model's own fault has failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytide.actors.serving.ray_serve.application import Application
from raytide.control.reconcile.decide import waiting_reasons
from raytide.control.reconcile.observation import ClusterObservation
from raytide.control.reconcile.serve_sync import ServeObservation, ServeSync, follow_serve
from raytide.control.views import Waiting
from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, InstallFailure
from raytide.core.objects.plan import Plan
from raytide.core.objects.snapshot import EndpointView, Snapshot

ENDPOINT = Endpoint(ServeSpec(name="m", model="/models/m"), "ana", EndpointState.DEPLOYING, 0.0, target_replicas=1)


class Serve:
    """Serve as its control sees it, with what it says of failures."""

    def __init__(self) -> None:
        self.starts = self.looks = 0
        self.deployed: list[str] = []
        self.deleted: list[str] = []
        self.live: set[str] = set()
        self.says = ""
        self.routed: list[tuple[str, bytes]] = []

    def start(self) -> None:
        self.starts += 1

    def applications(self) -> dict[str, Application]:
        self.looks += 1
        return {name: Application(failure=self.says) for name in self.live}

    def deploy(self, endpoint: Endpoint, *, is_there: bool) -> bool:
        if endpoint.name == "broken":
            raise ValueError("no such option")
        if is_there:
            return False
        if endpoint.name in self.live:  # deployed again, with a fresh failure count
            self.says = ""
        self.deployed.append(endpoint.name)
        self.live.add(endpoint.name)
        return True

    def publish(self, name: str, target: int) -> None: ...

    def publish_route(self, name: str, route: bytes) -> None:
        self.routed.append((name, route))

    def delete(self, name: str, *, is_there: bool) -> None:
        self.deleted.append(name)
        self.live.discard(name)
        self.says = ""


def passes(serving: ServeSync, count: int, *endpoints: Endpoint) -> ServeObservation:
    for _ in range(count):
        serving.sync(endpoints or [ENDPOINT])
        assert serving._pass is not None
        serving._pass.result(timeout=120)
    serving.sync(endpoints or [ENDPOINT])
    assert serving.served is not None
    return serving.served


@pytest.fixture
def serve() -> Serve:
    return Serve()


def test_serve_is_started_once_and_not_at_every_pass(serve: Serve) -> None:
    passes(ServeSync(serve), 5)  # type: ignore[arg-type]
    assert serve.starts == 1


def test_a_model_that_cannot_start_has_failed(serve: Serve) -> None:
    serve.says = "ValueError: no such option"
    assert passes(ServeSync(serve), 2).failures == {("m", 0.0): "ValueError: no such option"}  # type: ignore[arg-type]
    assert serve.deployed == ["m"]


def test_an_endpoint_whose_nodes_died_under_its_first_replicas_is_deployed_anew(serve: Serve) -> None:
    serve.says = "failed to start 3 times. The actor died because its node has died. Node Id: 00ff"
    assert passes(ServeSync(serve), 3).failures == {}  # type: ignore[arg-type]
    assert serve.deployed == ["m", "m"]
    assert serve.deleted == [], "replicas of an earlier spec serve on, and gateways do not take it for deleted"


def world(load: EndpointLoad | None) -> ClusterObservation:
    return ClusterObservation((), (), (), (), {}, {}, {} if load is None else {"m": load})


def test_a_pass_looks_at_serve_once_however_many_endpoints_there_are(serve: Serve) -> None:
    many = [replace(ENDPOINT, spec=ENDPOINT.spec.model_copy(update={"name": f"m{i}"})) for i in range(20)]
    leaving = replace(ENDPOINT, spec=ENDPOINT.spec.model_copy(update={"name": "old"}), state=EndpointState.DELETING)
    serving = ServeSync(serve)  # type: ignore[arg-type]
    passes(serving, 2, *many, leaving)
    assert serving._pass is not None
    serving._pass.result(timeout=120)
    assert serve.looks == 3
    assert len(serve.deployed) == 20


def test_a_new_spec_is_not_blamed_for_what_was_seen_before_it(serve: Serve) -> None:
    class Changed(Serve):
        def deploy(self, endpoint: Endpoint, *, is_there: bool) -> bool:
            return True

    changed = Changed()
    changed.live, changed.says = {"m"}, "ValueError: no such option"
    assert passes(ServeSync(changed), 1).failures == {}  # type: ignore[arg-type]


def test_an_endpoint_that_cannot_be_deployed_keeps_no_other_from_its_turn(serve: Serve) -> None:
    broken = replace(ENDPOINT, spec=ENDPOINT.spec.model_copy(update={"name": "broken"}))
    leaving = replace(ENDPOINT, spec=ENDPOINT.spec.model_copy(update={"name": "old"}), state=EndpointState.DELETING)
    seen = passes(ServeSync(serve), 1, broken, ENDPOINT, leaving)  # type: ignore[arg-type]
    assert serve.deployed == ["m"]
    assert seen.gone == {("old", 0.0)}
    assert seen.errors == ("endpoint broken: no such option",)
    assert follow_serve(broken, world(None), seen, 9.0) == broken
    assert follow_serve(leaving, world(None), seen, 9.0).state is EndpointState.DELETED


def test_an_endpoint_is_deleted_only_once_a_pass_has_deleted_it() -> None:
    leaving = replace(ENDPOINT, state=EndpointState.DELETING)
    before = ServeObservation()
    assert follow_serve(leaving, world(None), before, 9.0) == leaving, "a pass may be deploying it right now"
    assert follow_serve(leaving, world(None), ServeObservation(gone=frozenset({("m", -1.0)})), 9.0) == leaving, (
        "its namesake's end"
    )


def test_an_endpoint_of_which_nothing_was_heard_runs_on() -> None:
    running = replace(ENDPOINT, state=EndpointState.RUNNING)
    assert follow_serve(running, world(None), ServeObservation(), 9.0) == running
    assert (
        follow_serve(running, world(EndpointLoad(9.0, 0.0, 0)), ServeObservation(), 9.0).state
        is EndpointState.DEPLOYING
    )


def test_an_endpoint_whose_packages_cannot_be_installed_has_failed_with_pips_words() -> None:
    why = "the packages tidelib==3.0 cannot be installed on n: ERROR: No matching distribution found"
    load = EndpointLoad(9.0, 0.0, 0, install=InstallFailure(why, "n", is_final=True))
    trace = f"The deployment failed to start 3 times in a row. Error: ray::replica() ... ConfigError: {why}"
    failed = follow_serve(ENDPOINT, world(load), ServeObservation(failures={("m", 0.0): trace}), 9.0)
    assert (failed.state, failed.reason) == (EndpointState.FAILED, why)
    other = follow_serve(ENDPOINT, world(load), ServeObservation(failures={("m", 0.0): "no such option"}), 9.0)
    assert other.reason == "no such option"


def test_an_endpoint_says_that_it_waits_for_its_packages_while_replicas_are_missing() -> None:
    def waits(ready: int, *, is_final: bool) -> Waiting | None:
        load = EndpointLoad(9.0, 0.0, ready, install=InstallFailure("pip: 503", "n", is_final=is_final))
        seen = Snapshot(at_s=9.0, node_types=(), endpoints=(EndpointView(ENDPOINT, load),))
        return waiting_reasons(seen, Plan(9.0, ()), {}).get("m")

    never, again = waits(0, is_final=True), waits(0, is_final=False)
    assert never is not None and again is not None
    assert (never.constraint, never.reason, "Correct `pip`" in never.remedy) == ("packages", "pip: 503", True)
    assert "tried again" in again.remedy
    assert waits(ENDPOINT.target_replicas, is_final=True) is None


def test_an_endpoint_that_serve_takes_up_again_has_failed_no_more() -> None:
    failed = replace(ENDPOINT, state=EndpointState.FAILED, reason="no such option")
    again = follow_serve(failed, world(None), ServeObservation(), 9.0)
    assert (again.state, again.reason) == (EndpointState.DEPLOYING, "")


def test_an_update_that_failed_is_told_while_replicas_of_the_earlier_spec_serve_on() -> None:
    """Serve has given the update up: it starts no replica any more, also none of the earlier spec."""
    running, load = replace(ENDPOINT, state=EndpointState.RUNNING), EndpointLoad(9.0, 0.0, 1)
    failed = follow_serve(running, world(load), ServeObservation(failures={("m", 0.0): "no such option"}), 9.0)
    assert failed.state is EndpointState.RUNNING
    assert failed.reason.endswith("serve on: no such option")
    assert follow_serve(failed, world(load), ServeObservation(), 9.0) == running, "a corrected spec was served"


def test_an_endpoint_that_was_created_anew_is_not_blamed_for_the_failure_of_the_one_before() -> None:
    seen = ServeObservation(failures={("m", 0.0): "no such option"})
    assert follow_serve(ENDPOINT, world(None), seen, 9.0).state is EndpointState.FAILED
    assert follow_serve(replace(ENDPOINT, created_at_s=5.0), world(None), seen, 9.0).state is EndpointState.DEPLOYING
