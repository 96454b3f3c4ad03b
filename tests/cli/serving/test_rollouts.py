"""serve --canary, --shadow and --ab, and endpoint rollout: the requests that they become, and what is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.control.client import ApiClient
from raytide.control.views import RevisionOutcome, RolloutStatus
from raytide.core.errors import NotFoundError, UsageError
from raytide.core.objects.endpoint import EndpointRevision, ServeSpec
from raytide.core.specs.rollout import CountedRevision, RevisionFeedback, Rollout, RolloutState
from raytide.registry.rollout.canary import CanarySpec, CanaryStep
from raytide.registry.rollout.lifecycle import intervals
from raytide.sdk.registry.rollouts import rollout_of

ROLLOUT = Rollout(
    3, "web", "blue", "ana", "canary", {}, 1, 2, "web", "web~2", 5.0, why="newer", state=RolloutState.RUNNING,
    percent=25.0, reason="25 % for another 10 s",
)  # fmt: skip


class Api(ApiClient):
    """An API with one rollout."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", "")
        self.asked: list[tuple[str, Any, str]] = []
        self.rollout: Rollout | None = ROLLOUT

    def status(self) -> RolloutStatus:  # type: ignore[override]
        assert self.rollout is not None
        champion = CountedRevision(rollout=3, revision=1, requests=300, errors=3, started=300, first_token_ms=60_000)
        challenger = CountedRevision(rollout=3, revision=2, compared=4, equal=3)
        sides = ((1, "chat:1", champion), (2, "", challenger))
        values = {2: {"edits": (20, 5)}} if self.rollout.state is RolloutState.PROMOTED else {}
        outcomes = (RevisionOutcome(n, v, c, intervals(c, values.get(n, {}))) for n, v, c in sides)
        return RolloutStatus(self.rollout, *outcomes)

    def start_rollout(self, spec: ServeSpec, rollout: Mapping[str, Any], why: str = "") -> RolloutStatus:
        self.asked.append((spec.name, rollout, why))
        return self.status()

    def rollouts(self, name: str, limit: int = 100) -> list[RolloutStatus]:
        return [self.status()] if self.rollout is not None else []

    def end_rollout(self, name: str, end: str, why: str = "") -> RolloutStatus:  # type: ignore[override]
        self.asked.append((name, end, why))
        self.rollout = replace(ROLLOUT, asked=end, asked_by="bo", asked_why=why)  # type: ignore[arg-type]
        return self.status()

    def revisions(self, name: str) -> list[EndpointRevision]:
        return [EndpointRevision("web", 1, "blue", "ana", 5.0, "", ServeSpec(name="web", model="/m"))]

    def feedback(self, name: str) -> list[RevisionFeedback]:
        return [RevisionFeedback(1, 2, 1, {"edits": (20, 3.25)})]


@pytest.fixture(autouse=True)
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api()
    monkeypatch.setattr(ApiClient, "find", lambda _: made)
    return made


def run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_rollout_begins_with_default_steps_or_those_of_a_file(api: Api, tmp_path: Path) -> None:
    steps = tmp_path / "steps.yaml"
    steps.write_text("steps: [{percent: 50}]\nready_within_s: 60\n")
    printed = run("serve", "registry:chat:2", "--name", "web", "--canary", "defaults", "--why", "newer")
    assert "canary of revision 2 of web: running with 25 % of the traffic: 25 % for another 10 s" in printed
    run("serve", "registry:chat:2", "--name", "web", "--canary", str(steps))
    run("serve", "registry:chat:2", "--name", "web", "--shadow", "10")
    run("serve", "registry:chat:2", "--name", "web", "--ab", "50")
    assert api.asked == [
        ("web", {"canary": {}}, "newer"),
        ("web", {"canary": {"steps": [{"percent": 50}]}, "ready_within_s": 60}, ""),
        ("web", {"shadow": {"percent": 10.0}}, ""),
        ("web", {"ab": {"percent": 50.0}}, ""),
    ]
    assert json.loads(run("serve", "registry:chat:2", "--ab", "50", "--json"))["rollout"]["name"] == "web"
    test = tmp_path / "test.yaml"
    test.write_text("metric: edits\ntest: {effect: 2, better: lower}\n")
    run("serve", "registry:chat:2", "--name", "web", "--ab", str(test))
    assert api.asked[-1] == ("web", {"ab": {"metric": "edits", "test": {"effect": 2, "better": "lower"}}}, "")
    assert rollout_of(ab={"metric": "edits"}) == {"ab": {"metric": "edits"}}


def test_a_rollout_is_shown_and_ended(api: Api) -> None:
    printed = run("endpoint", "rollout", "web")
    assert "champion\t1\tchat:1\t300\t1.00% (0.34% to 2.90%)\t0.00% (0.00% to 1.26%)\t-\t0.200 s\t-" in printed
    assert "challenger\t2\t-\t0\t-\t-\t-\t-\t3 of 4" in printed
    assert json.loads(run("endpoint", "rollout", "web", "--json"))["champion"]["counts"]["requests"] == 300
    assert "stop was asked for by bo" in run("endpoint", "rollout", "web", "--stop", "--why", "it rhymes")
    run("endpoint", "rollout", "web", "--promote")
    assert api.asked == [("web", "stop", "it rhymes"), ("web", "promote", "")]
    history = run("endpoint", "history", "web")
    assert "ana\tcanary 1 -> 2\trunning\tnewer\t-\t25 % for another 10 s" in history
    assert "2 up, 1 down, edits 3.25 of 20" in history
    api.rollout = replace(ROLLOUT, state=RolloutState.PROMOTED)
    printed = run("endpoint", "rollout", "web")
    assert "BAD edits" in printed
    assert "-\t25.00% (11.19% to 46.87%)" in printed
    api.rollout = None
    with pytest.raises(NotFoundError, match="had no rollout yet"):
        run("endpoint", "rollout", "web")


@pytest.mark.parametrize(
    "args",
    [
        ("serve", "m", "--canary", "defaults", "--shadow", "5"),
        ("serve", "--canary", "defaults"),
        ("serve", "web", "--rollback", "--ab", "50"),
        ("serve", "m", "--why", "newer"),
        ("endpoint", "rollout", "web", "--stop", "--promote"),
        ("endpoint", "rollout", "web", "--why", "newer"),
    ],
)
def test_what_cannot_be_combined(args: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        run(*args)


def test_the_sdk_takes_steps_in_three_forms() -> None:
    assert rollout_of() is None
    assert rollout_of(canary=True) == {"canary": {}}
    assert rollout_of(canary={"alpha": 0.01, "ready_within_s": 5}) == {"canary": {"alpha": 0.01}, "ready_within_s": 5}
    spec = CanarySpec(steps=(CanaryStep(percent=50),))
    asked = rollout_of(canary=spec)
    assert asked is not None
    assert asked["canary"]["steps"] == [{"percent": 50.0, "for_s": 60.0, "requests": 100}]
    with pytest.raises(UsageError, match="canary and ab"):
        rollout_of(canary=True, ab=5)
