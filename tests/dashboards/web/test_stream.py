"""The stream: what listeners are told, how often it is worked out, and which of them are dropped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.errors import AuthError, QuotaError
from raytide.dashboards.web import stream
from raytide.dashboards.web.picture import PagePicture
from raytide.dashboards.web.stream import EventStream, Listener, Streams, changes

Content = dict[str, Any]
fields = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3), min_size=1)
tables = st.dictionaries(st.sampled_from(["job-1", "job-2", "job-3"]), fields)


def picture(**changes: Any) -> PagePicture:
    rows = {f"job-{n}": {"id": f"job-{n}", "team": team, "step": 0} for n, team in ((1, "one"), (2, "two"))}
    return replace(PagePicture(status={"name": "here", "plan": 4}, jobs=rows), **changes)


def parsed(message: bytes) -> tuple[str, Any]:
    head, data = message.decode().removesuffix("\n\n").split("\n")
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def applied(known: Content, told: Content) -> Content:
    """Returns the rows that the page has after a message."""
    rows = {} if told.get("all") else {name: row for name, row in known.items() if name not in told.get("gone", [])}
    return {**rows, **{name: {**rows.get(name, {}), **row} for name, row in told["rows"].items()}}


@given(before=tables, now=tables)
def test_a_page_that_applies_the_changes_knows_the_rows(before: Content, now: Content) -> None:
    same_fields = {name: {**dict.fromkeys(before.get(name, {}), 9), **row} for name, row in now.items()}
    told = changes({"jobs": before}, {"jobs": same_fields})
    assert (applied(before, told["jobs"]) if told else before) == same_fields


def test_an_unchanged_picture_tells_nothing() -> None:
    seen = picture().seen_by("*")
    assert changes(seen, picture().seen_by("*")) == {}
    assert changes(None, seen).keys() == {"status", "jobs", "nodes", "endpoints", "teams", "alerts"}


@pytest.mark.parametrize("team", ["*", "one"])
def test_a_page_that_has_the_status_has_all_tables(team: str) -> None:
    """The tables may come in parts: until the status is there, the page shows that it loads."""
    *tables, last = changes(None, picture().seen_by(team))
    assert (last, sorted(tables)) == ("status", ["alerts", "endpoints", "jobs", "nodes", "teams"])


def test_a_team_is_told_of_its_own_jobs_and_of_no_plan() -> None:
    seen = picture(price_micro_usd_h={"one": 5, "two": 7, "": 1}).seen_by("one")
    assert list(seen["jobs"]) == ["job-1"]
    assert seen["status"] == {"name": "here", "price_micro_usd_h": 5, "cost_micro_usd": 0}
    assert picture(price_micro_usd_h={"one": 5, "two": 7, "": 1}).seen_by("*")["status"]["price_micro_usd_h"] == 13


def test_a_team_sees_that_a_node_is_held_and_not_by_whom() -> None:
    held = [
        {"use": "training", "subject": "job-1", "team": "one", "weight": 0.5},
        {"use": "training", "subject": "job-2", "team": "two", "weight": 0.5},
    ]
    node = {"id": "node-1", "reason": "bought for job-2", "subject": "job-2", "held": held}
    seen = picture(nodes={"node-1": node}).seen_by("one")["nodes"]["node-1"]
    assert seen["held"] == [held[0], {**held[1], "subject": "", "team": "-"}]
    assert "job-2" not in json.dumps(seen)


def test_a_team_is_told_of_alerts_that_concern_it_or_everybody() -> None:
    alerts = {name: {"name": name, "labels": labels} for name, labels in (
        ("Own", {"team": "one"}), ("Other", {"team": "two"}), ("Shared", {"node": "node-1"}),
    )}  # fmt: skip
    assert set(picture(alerts=alerts).seen_by("one")["alerts"]) == {"Own", "Shared"}
    assert set(picture(alerts=alerts).seen_by("*")["alerts"]) == set(alerts)


async def test_one_picture_serves_all_listeners() -> None:
    taken = 0

    def take() -> PagePicture:
        nonlocal taken
        taken += 1
        return picture()

    streams = Streams(take, period_s=3600)
    listeners = [streams.join(team) for team in ("one", "one", "two", "*")]
    told = {await first(listener, "jobs") for listener in listeners}
    assert taken == 1
    assert len(told) == 3  # both listeners of a team are sent the same bytes
    late = streams.join("one")
    assert await first(late, "jobs") == await first_again(listeners[0])
    assert taken == 1
    for listener in [*listeners, late]:
        streams.leave(listener)


async def first(listener: Listener, kind: str) -> bytes:
    """The first message of a kind; later ones stay."""
    while True:
        message = await asyncio.wait_for(listener.messages.get(), 60)
        assert message is not None
        if parsed(message)[0] == kind:
            listener.kept = message  # type: ignore[attr-defined]
            return message


async def first_again(listener: Listener) -> bytes:
    kept: bytes = listener.kept  # type: ignore[attr-defined]
    return kept


async def test_changes_follow_and_a_failed_picture_does_not_end_them(caplog: pytest.LogCaptureFixture) -> None:
    step = 0

    def take() -> PagePicture:
        nonlocal step
        step += 1
        if step == 2:
            raise OSError("the disk is gone")
        return picture(jobs={"job-1": {"id": "job-1", "team": "one", "step": step}})

    streams = Streams(take, period_s=0.001)
    listener = streams.join("one")
    assert parsed(await first(listener, "jobs"))[1]["all"] is True
    _, change = parsed(await first(listener, "jobs"))
    assert change == {"rows": {"job-1": {"step": 3}}, "gone": []}
    assert "the disk is gone" in caplog.text
    streams.leave(listener)


async def test_a_listener_that_does_not_read_is_dropped_and_others_go_on() -> None:
    step = 0

    def take() -> PagePicture:
        nonlocal step
        step += 1
        return picture(jobs={"job-1": {"id": "job-1", "team": "one", "step": step}})

    streams = Streams(take, period_s=0.001)
    slow, quick = streams.join("one"), streams.join("one")
    while not slow.is_dropped:
        await first(quick, "jobs")
    assert slow.messages.qsize() <= stream.MOST_QUEUED + 1
    assert parsed(await first(quick, "jobs"))[1]["rows"]
    streams.leave(quick)


async def test_the_number_of_listeners_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_LISTENERS", 2)
    streams = Streams(picture, period_s=3600)
    one, two = streams.join("one"), streams.join("two")
    with pytest.raises(QuotaError):
        streams.join("three")
    streams.leave(one)
    for listener in (two, streams.join("three")):
        streams.leave(listener)


async def test_a_team_with_many_pages_keeps_no_other_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_LISTENERS", 3)
    streams = Streams(picture, period_s=3600)
    many = [streams.join("one") for _ in range(3)]
    with pytest.raises(QuotaError):
        streams.join("one")
    other = streams.join("two")
    assert [each.is_dropped for each in (*many, other)] == [True, False, False, False]
    with pytest.raises(QuotaError):  # the teams do not take places from each other in turn
        streams.join("two")
    for listener in (*many, other):
        streams.leave(listener)


class Wire:
    """One ASGI response: what was sent, and a client that leaves when it is told to."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leaves, self.changed = asyncio.Event(), asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.changed.set()

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not what():
                self.changed.clear()
                await self.changed.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def valid() -> None:
    return None


async def revoked() -> None:
    raise AuthError("gone.", hint="Ask.")


async def test_a_stream_begins_with_its_caller_and_beats_while_nothing_changes() -> None:
    streams, wire = Streams(picture, period_s=0.01), Wire()
    response = EventStream(streams, "one", {"user": "ana"}, valid, beat_s=0.01)
    task = asyncio.create_task(response({}, wire.receive, wire.send))
    await wire.until(lambda: b"event: jobs" in wire.body and wire.body.count(b": beat") >= 2)
    assert wire.body.startswith(b'event: hello\ndata: {"user":"ana"}\n\n')
    assert wire.body.count(b"event: jobs") == 1
    wire.leaves.set()
    await asyncio.wait_for(task, 60)
    assert streams._listeners == {}


async def test_a_stream_ends_once_its_token_is_revoked() -> None:
    streams, wire = Streams(picture, period_s=3600), Wire()
    await asyncio.wait_for(EventStream(streams, "one", {}, revoked, beat_s=0.01)({}, wire.receive, wire.send), 60)
    assert wire.sent[-1]["more_body"] is False
    assert streams._listeners == {}


async def test_a_stream_that_is_never_silent_ends_once_its_token_is_revoked() -> None:
    streams, wire = Streams(picture, period_s=3600), Wire()
    response = EventStream(streams, "one", {}, revoked, beat_s=0.01)

    async def send(message: Any) -> None:
        response._listener.put(stream.event("jobs", {}))  # the next message waits already
        await wire.send(message)

    await asyncio.wait_for(response({}, wire.receive, send), 60)
    assert wire.sent[-1]["more_body"] is False


async def test_a_client_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SEND_S", 0.01)
    streams, wire = Streams(picture, period_s=3600), Wire()

    async def stuck(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    await asyncio.wait_for(EventStream(streams, "one", {}, valid)({}, wire.receive, stuck), 60)
    assert streams._listeners == {}


async def test_a_stream_ends_after_its_longest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LONGEST_S", 0.01)
    streams, wire = Streams(picture, period_s=3600), Wire()
    await asyncio.wait_for(EventStream(streams, "one", {}, valid)({}, wire.receive, wire.send), 60)
    assert wire.sent[-1]["more_body"] is False
