"""Thumbs for answers: by the id of the response, through any gateway, for the team that asked, by revision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from tests.gateway.conftest import Gateway, running_gateway
from tests.gateway.tenancy.conftest import Line, line, secret_of, store  # noqa: F401

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.core.specs.rollout import MetricLimit, RevisionFeedback, RolloutReport, served_revision, served_version
from raytide.core.state import Store
from raytide.gateway.rollouts import feedback
from raytide.gateway.rollouts.counting import RolloutReporter


@pytest.fixture(autouse=True)
def reports_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judgement waits longer for the report of its answer than in production: a busy machine writes it late."""
    monkeypatch.setattr(feedback, "_UNREPORTED_S", (0.6, 1.2, *[1.0] * 60))


async def deploy(gateway: Gateway) -> None:
    await gateway.deploy("chat", FakeEngine(reply="old "))
    entry = gateway.listing["chat"]
    spec = entry.spec.model_copy(update={"version": "chat:4"})
    gateway.listing["chat"] = replace(entry, spec=spec, revision=7)
    gateway.models.update(gateway.listing)


async def ask(gateway: Gateway, path: str, secret: str, body: dict[str, object]) -> httpx.Response:
    headers = {"authorization": f"Bearer {secret}"}
    return await gateway.http.post(f"/v1/{path}", json={"model": "chat", "max_tokens": 4, **body}, headers=headers)


async def judge(gateway: Gateway, secret: str, request_id: str, score: str = "down", path: str = "") -> httpx.Response:
    body = {"request_id": request_id, "score": score}
    return await gateway.http.post(f"{path}/v1/feedback", json=body, headers={"authorization": f"Bearer {secret}"})


async def test_an_answer_is_judged_through_another_gateway_and_the_last_judgement_counts(
    store: Store,  # noqa: F811
    line: Line,  # noqa: F811
    secret_of: Callable[..., str],  # noqa: F811
) -> None:
    secret = secret_of(team="blue")
    async with (
        running_gateway(requires_keys=True, api=line.api()) as one,
        running_gateway(requires_keys=True, api=line.api("g2")) as two,
    ):
        await deploy(one)
        chat = await ask(one, "chat/completions", secret, {"messages": [{"role": "user", "content": "hi"}]})
        text = await ask(one, "completions", secret, {"prompt": "hi", "stream": True})
        body = {"model": "chat", "input": "hi", "max_output_tokens": 16}
        item = await one.http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {secret}"})
        message = await ask(one, "messages", secret, {"messages": [{"role": "user", "content": "hi"}]})
        ids = [chat.json()["id"], text.text.split('"id":"')[1].split('"')[0], item.json()["id"], message.json()["id"]]
        assert [each[:4] for each in ids] == ["chat", "cmpl", "resp", "msg_"]
        for each in ids:
            assert (await judge(two, secret, each)).json()["revision"] == 7
        assert (await judge(one, secret, ids[0], "up")).json()["score"] == "up"
    assert store.feedback.sums("chat") == (RevisionFeedback(7, up=1, down=3),)
    usage, _ = store.tenancy.usage.rows(feedback_filter())
    assert {row.version for row in usage} == {"chat:4 r7"}
    assert {row.id for row in usage} >= {each.replace("_", "-").rpartition("-")[2] for each in ids}
    store.feedback.prune(1e12)
    assert store.feedback.sums("chat") == ()


async def test_requests_of_other_teams_and_unknown_ones_are_not_found(
    store: Store,  # noqa: F811
    line: Line,  # noqa: F811
    secret_of: Callable[..., str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret, other = secret_of(team="blue"), secret_of(team="green", name="other")
    async with running_gateway(requires_keys=True, api=line.api()) as gateway:
        await deploy(gateway)
        answer = await ask(gateway, "completions", secret, {"prompt": "hi"})
        assert (await judge(gateway, secret, answer.json()["id"])).status_code == 200
        monkeypatch.setattr(feedback, "_UNREPORTED_S", ())
        for who, which, path in (
            (other, answer.json()["id"], ""),
            (secret, "chatcmpl-" + "0" * 32, ""),
            (secret, answer.json()["id"], "/another"),
        ):
            refused = await judge(gateway, who, which, path=path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        asked = line.calls.count("/v1/gateway/feedback")
        assert (await judge(gateway, secret, "no id of an answer".replace(" ", "_"))).status_code == 404
        assert line.calls.count("/v1/gateway/feedback") == asked, "the API is spared what cannot be one"
        assert (await judge(gateway, secret, answer.json()["id"], "sideways")).status_code == 400
        assert (await judge(gateway, "rk-wrong", answer.json()["id"])).status_code == 401
    assert store.feedback.sums("chat") == (RevisionFeedback(7, 0, 1),)


async def test_totals_are_reported_when_they_have_changed(store: Store, line: Line) -> None:  # noqa: F811
    from tests.core.state.registry.test_rollouts import begun

    rollout = begun(store)
    api = line.api()
    counted = [RolloutReport.model_validate(report(rollout.number, 5)).counted[0]]
    reporter = RolloutReporter(api, lambda: counted)
    for _ in range(3):
        await reporter.report()
    assert line.calls.count("/v1/gateway/rollouts") == 1
    counted = [RolloutReport.model_validate(report(rollout.number, 8)).counted[0]]
    line.answers_lost = True
    with pytest.raises(Exception, match="does not answer"):
        await reporter.report()
    line.answers_lost = False
    await reporter.report()
    assert store.rollouts.counts([rollout.number])[rollout.number][2].requests == 8, "a repeated report adds nothing"
    await api.close()


def report(rollout: int, requests: int) -> dict[str, object]:
    return {"gateway": "g", "counted": [{"rollout": rollout, "revision": 2, "requests": requests}]}


def feedback_filter() -> object:
    from raytide.core.state.tenancy.usage import UsageFilter

    return UsageFilter()


@pytest.mark.parametrize(
    ("version", "revision", "served"), [("chat:2", 7, "chat:2 r7"), ("", 7, "r7"), ("chat:2", 0, "chat:2"), ("", 0, "")]
)
def test_versions_of_usage(version: str, revision: int, served: str) -> None:
    assert served_version(version, revision) == served
    assert served_revision(served) == revision


async def test_in_an_a_b_test_a_judgement_is_of_its_users_group_through_any_gateway(
    store: Store,  # noqa: F811
    line: Line,  # noqa: F811
    secret_of: Callable[..., str],  # noqa: F811
) -> None:
    from tests.gateway.rollouts.test_canary_traffic import begin

    secret = secret_of(team="blue")
    async with running_gateway(requires_keys=True, api=line.api()) as gateway:
        await begin(gateway, FakeEngine(reply="new "), percent=50.0)
        entry = gateway.listing["chat"]
        assert entry.rollout is not None
        gateway.listing["chat"] = replace(entry, rollout=entry.rollout.model_copy(update={"by_key": True}))
        gateway.models.update(gateway.listing)
        expected: dict[int, dict[int, tuple[int, float]]] = {1: {}, 2: {}}
        split, account = entry.rollout.split, store.tenancy.keys.page()[0].account
        for number in range(20):
            user = f"user-{number}"
            answer = await ask(gateway, "completions", secret, {"prompt": "hi", "user": user})
            await judge(gateway, secret, answer.json()["id"], "up" if number % 2 else "down")
            await send(gateway, secret, answer.json()["id"], metric="edits", value=number % 2)
            unit = f"{account}/{user}"
            judged, liked = expected[split.revision_of(unit)].get(split.group_of(unit), (0, 0))
            expected[split.revision_of(unit)][split.group_of(unit)] = (judged + 1, liked + number % 2)
        keyed = [await ask(gateway, "completions", secret, {"prompt": f"hi {number}"}) for number in range(10)]
        assert len({each.headers["x-raytide-revision"] for each in keyed}) == 1, "who names no user is one with its key"
        assert {each.json()["id"][-2:] for each in keyed} == {f"{split.group_of(account):02d}"}
    assert store.feedback.groups("chat", 0.0) == expected
    assert store.feedback.groups("chat", 0.0, "edits") == expected
    assert store.feedback.groups("chat", 0.0, "other") == {}
    assert store.feedback.groups("chat", 1e12) == {}


async def send(gateway: Gateway, secret: str, request_id: str, **given: object) -> httpx.Response:
    body = {"request_id": request_id, **given}
    return await gateway.http.post("/v1/feedback", json=body, headers={"authorization": f"Bearer {secret}"})


async def test_values_of_users_metrics_are_kept_by_answer_beside_thumbs(
    store: Store,  # noqa: F811
    line: Line,  # noqa: F811
    secret_of: Callable[..., str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret, stranger = secret_of(team="blue"), secret_of(team="green", name="other")
    async with running_gateway(requires_keys=True, api=line.api()) as gateway:
        await deploy(gateway)
        ids = [(await ask(gateway, "completions", secret, {"prompt": f"hi {n}"})).json()["id"] for n in range(2)]
        given = await send(gateway, secret, ids[0], metric="accepted", value=0.25)
        assert (given.status_code, given.json()["metric"], given.json()["value"]) == (200, "accepted", 0.25)
        assert given.json()["revision"] == 7
        await send(gateway, secret, ids[0], metric="accepted", value=0.5)
        await send(gateway, secret, ids[0], metric="seconds", value=30)
        await send(gateway, secret, ids[1], metric="accepted", value=1)
        await send(gateway, secret, ids[1], score="up")
        for wrong in (
            {},
            {"metric": "accepted"},
            {"value": 1},
            {"metric": "accepted", "value": 1, "score": "up"},
            {"metric": "Not a name", "value": 1},
            {"metric": "accepted", "value": 1e300},
            {"metric": "accepted", "value": "much"},
        ):
            refused = await send(gateway, secret, ids[0], **wrong)
            assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error"), wrong
        for number in range(14):
            assert (await send(gateway, secret, ids[0], metric=f"m{number}", value=number)).status_code == 200
        beyond = await send(gateway, secret, ids[0], metric="one_more", value=1)
        assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "metric")
        assert (await send(gateway, secret, ids[0], metric="m3", value=4)).status_code == 200, "it has that one"
        monkeypatch.setattr(feedback, "_UNREPORTED_S", ())
        assert (await send(gateway, stranger, ids[0], metric="accepted", value=0)).status_code == 404
    (found,) = store.feedback.sums("chat")
    assert (found.revision, found.up, found.down) == (7, 1, 0)
    assert found.metrics["accepted"] == (2, 0.75)
    assert found.metrics["seconds"] == (1, 30.0)
    limits = {"accepted": MetricLimit(below=0.6), "seconds": MetricLimit(above=40)}
    assert store.feedback.bad_values("chat", limits, 0.0) == {7: {"accepted": (2, 1), "seconds": (1, 0)}}
    assert store.feedback.bad_values("chat", limits, 1e12) == {}
    store.feedback.prune(1e12)
    assert store.feedback.sums("chat") == ()
