"""Teams that share one engine, in virtual time: one token a second for each running request."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.virtual_loop import run_virtually

from raytide.actors.engine import FakeEngine, SamplingParams
from raytide.actors.engine.backends.remote.direct_output import DirectOutput
from raytide.actors.engine.backends.remote.fair_admission import FairAdmission
from raytide.actors.engine.backends.vllm.request import check_request, lost_on_resume
from raytide.actors.engine.types import GenChunk, GenRequest
from raytide.core.errors import ConflictError, EngineDeadError, OverloadedError

PLACES = 16
REPLY = "tide "


def request(name: str, tokens: int = 20, *, team: str = "", prompt: int = 8, **fields: object) -> GenRequest:
    """The team is the first part of the name, unless it is given."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    fields = {"sampling": sampling, "team": team or name.partition("-")[0], **fields}
    return GenRequest(request_id=name, prompt=[7] * prompt, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def admission(
    *, slo_ttft_s: float | None = None, **options: object
) -> AsyncIterator[tuple[FairAdmission, FakeEngine]]:
    options = {"max_running": PLACES, "max_waiting": 256, "tokens_per_s": 1.0, **options}
    engine = FakeEngine(**options)  # type: ignore[arg-type]
    yield FairAdmission(engine, await engine.start(), DirectOutput(), slo_ttft_s=slo_ttft_s), engine
    await engine.shutdown()


async def answer(fair: FairAdmission, asked: GenRequest) -> list[GenChunk]:
    async with aclosing(fair.generate(asked)) as chunks:
        return [chunk async for chunk in chunks]


def text_of(chunks: list[GenChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def expected(tokens: int) -> str:
    return (REPLY * tokens)[:tokens]


async def timed(fair: FairAdmission, asked: GenRequest) -> tuple[float, float]:
    """Returns the seconds to the first token and to the last."""
    loop = asyncio.get_running_loop()
    began_s, first_s = loop.time(), 0.0
    async with aclosing(fair.generate(asked)) as chunks:
        async for chunk in chunks:
            first_s = first_s or loop.time() - began_s
            assert chunk.finish_reason != "abort"
    return first_s, loop.time() - began_s


async def one_after_another(
    fair: FairAdmission, name: str, tokens: Callable[[], int], served: Counter[str], **fields: object
) -> None:
    number = 0
    while True:
        number += 1
        chunks = fair.generate(request(f"{name}-{number}", tokens(), team=name.partition("/")[0], **fields))
        async with aclosing(chunks):
            async for chunk in chunks:
                served[name.partition("/")[0]] += len(chunk.token_ids)


@asynccontextmanager
async def streams(
    fair: FairAdmission, team: str, count: int, tokens: int | Callable[[], int], served: Counter[str], **fields: object
) -> AsyncIterator[None]:
    """A team's closed-loop streams, until the end of the block. `tokens` is the length of its answers, or draws one."""
    draw = tokens if callable(tokens) else lambda: tokens
    tasks = [asyncio.create_task(one_after_another(fair, f"{team}/{n}", draw, served, **fields)) for n in range(count)]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("heavy_tokens", [20, 97, 1000])
def test_a_light_team_is_as_fast_beside_a_heavy_one_as_alone(heavy_tokens: int) -> None:
    """The heavy team has 64 streams for 16 places. The light one asks one after another: its slowest request takes at
    most 1.3 times as long as alone, and no place of the engine stays empty.
    """

    async def body() -> None:
        async with admission() as (fair, engine):
            alone = [await timed(fair, request(f"light-{n}")) for n in range(10)]
            served: Counter[str] = Counter()
            async with streams(fair, "heavy", 64, heavy_tokens, served):
                await asyncio.sleep(150.5)
                before, began_s = (await engine.stats()).generated_tokens, asyncio.get_running_loop().time()
                beside = []
                for number in range(60):
                    beside.append(await timed(fair, request(f"light-{number}")))
                    await asyncio.sleep(0.3 * (number % 7))
                seconds = asyncio.get_running_loop().time() - began_s
                tokens = (await engine.stats()).generated_tokens - before
            assert max(whole for _, whole in beside) <= 1.3 * max(whole for _, whole in alone)
            assert max(first for first, _ in beside) <= max(first for first, _ in alone) + 3.0
            assert tokens >= 0.93 * PLACES * seconds
            assert served["heavy"] > 0.85 * (PLACES - 1) * seconds

    run_virtually(body())


@pytest.mark.parametrize(
    ("weights", "counts"), [((1.0, 1.0), (64, 16)), ((1.0, 3.0), (48, 20)), ((2.0, 1.0), (20, 40))]
)
def test_teams_that_always_wait_get_tokens_by_their_weight(
    weights: tuple[float, float], counts: tuple[int, int]
) -> None:
    """The lengths of the answers vary. If all were equal, those that start together would end together, and 16 streams
    would then at times all run, which is not always waiting.
    """
    rng = random.Random(0)

    def about(mean: int) -> Callable[[], int]:
        return lambda: 1 + min(int(rng.expovariate(1 / mean)), 10 * mean)

    async def body() -> None:
        served: Counter[str] = Counter()
        async with (
            admission() as (fair, _),
            streams(fair, "a", counts[0], about(50), served, weight=weights[0], prompt=1),
            streams(fair, "b", counts[1], about(30), served, weight=weights[1], prompt=1),
        ):
            await asyncio.sleep(500)
            served.clear()
            await asyncio.sleep(4000)
            assert served["a"] * 51 / 50 / (served["b"] * 31 / 30) == pytest.approx(weights[0] / weights[1], rel=0.03)

    run_virtually(body())


def test_one_team_alone_has_all_places() -> None:
    async def body() -> None:
        served: Counter[str] = Counter()
        async with admission() as (fair, engine), streams(fair, "a", 40, 25, served):
            await asyncio.sleep(100)
            before = (await engine.stats()).generated_tokens
            await asyncio.sleep(1000)
            assert (await engine.stats()).generated_tokens - before >= 0.99 * PLACES * 1000

    run_virtually(body())


WORK = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 40),  # arrives after
        st.integers(1, 30),  # tokens
        st.integers(-1, 1),  # priority
        st.one_of(st.none(), st.integers(0, 30)),  # leaves after
        st.integers(1, 3),  # samples
    ),
    max_size=40,
)


@settings(deadline=None)
@given(WORK, st.integers(1, 5), st.booleans())
def test_every_request_gets_its_text_once_whatever_happens(
    work: list[tuple[str, int, int, int, int | None, int]], places: int, has_little_kv: bool
) -> None:
    """Requests arrive, are taken out for others, and leave: texts and usage are those of an engine alone, and nothing
    stays counted."""

    async def one(fair: FairAdmission, number: int, row: tuple[str, int, int, int, int | None, int]) -> None:
        team, at, tokens, priority, leaves_after, samples = row
        samples = min(samples, places)
        asked = request(f"{team}-{number}", tokens, priority=priority)
        asked = replace(asked, sampling=replace(asked.sampling, n=samples))
        await asyncio.sleep(at)
        if leaves_after is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(answer(fair, asked), leaves_after)
            return
        chunks = await answer(fair, asked)
        for sample in range(samples):
            of_sample = [chunk for chunk in chunks if chunk.index == sample]
            assert text_of(of_sample) == expected(tokens)
            assert [chunk.finish_reason for chunk in of_sample if chunk.finish_reason] == ["length"]
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (8, tokens * samples)

    async def body() -> None:
        kv_tokens = 100 if has_little_kv else 0
        async with admission(max_running=places, kv_tokens=kv_tokens) as (fair, engine):
            await asyncio.gather(*(one(fair, number, row) for number, row in enumerate(work)))
            stats = await engine.stats()
            assert (stats.running, stats.waiting, fair.waiting) == (0, 0, 0)
            assert (fair._used, fair._asked, fair._unanswered, fair._kv_tokens) == (0, 0, 0, 0)
            assert not (fair._teams or fair._entries or fair._preempting)

    run_virtually(body())


def test_a_more_urgent_request_takes_the_place_of_a_less_urgent_one() -> None:
    async def body() -> None:
        async with admission(max_running=2) as (fair, _):
            batch = [asyncio.create_task(answer(fair, request(f"a-{n}", 100, priority=10))) for n in range(8)]
            await asyncio.sleep(30)
            firsts = [await timed(fair, request(f"b-{n}", 10)) for n in range(2)]
            assert max(whole for _, whole in firsts) <= 13
            assert [text_of(each) for each in await asyncio.gather(*batch)] == [expected(100)] * 8

    run_virtually(body())


async def review(fair: FairAdmission) -> None:
    while True:
        fair.dispatch()
        await asyncio.sleep(0.25)


def test_many_samples_of_one_request_keep_nobody_out() -> None:
    """They begin with one free place, and make way as a whole."""

    async def body() -> None:
        async with admission() as (fair, _):
            long = [asyncio.create_task(answer(fair, request(f"a-{n}", 500))) for n in range(PLACES - 1)]
            await asyncio.sleep(5)
            sampling = SamplingParams(temperature=0, max_tokens=100, n=PLACES)
            many = [asyncio.create_task(answer(fair, replace(request(f"b-{n}"), sampling=sampling))) for n in range(3)]
            await asyncio.sleep(5)
            assert fair._entries["b-0"].tokens > 0
            reviewing = asyncio.create_task(review(fair))
            for number in range(5):
                assert (await timed(fair, request(f"c-{number}")))[1] <= 30
            reviewing.cancel()
            assert not any(task.done() for task in many)
            for chunks in await asyncio.gather(*many):
                assert Counter(chunk.index for chunk in chunks if chunk.text) == dict.fromkeys(range(PLACES), 100)
            await asyncio.gather(*long)

    run_virtually(body())


def test_the_longest_queue_loses_a_request_when_all_are_full() -> None:
    """A team with a long queue cannot keep others out; what was begun is never refused."""

    async def body() -> None:
        async with admission(max_running=2, max_waiting=6) as (fair, _):
            heavy = [asyncio.create_task(answer(fair, request(f"heavy-{n}", 20))) for n in range(8)]
            await asyncio.sleep(5)
            with pytest.raises(OverloadedError):
                await answer(fair, request("heavy-8"))
            light = [asyncio.create_task(answer(fair, request(f"light-{n}", 20))) for n in range(5)]
            results = await asyncio.gather(*heavy, *light, return_exceptions=True)
            refused = [type(each) for each in results if isinstance(each, Exception)]
            assert refused == [OverloadedError] * 5
            assert sum(isinstance(each, list) for each in results[:2]) == 2
            assert sum(isinstance(each, list) for each in results[8:]) >= 3

    run_virtually(body())


def test_a_request_that_waits_can_be_aborted_and_its_id_is_taken() -> None:
    async def body() -> None:
        async with admission(max_running=1) as (fair, _):
            running = asyncio.create_task(answer(fair, request("a-1", 30)))
            spare = asyncio.create_task(answer(fair, request("a-2", 30)))
            waiting = asyncio.create_task(answer(fair, replace(request("a-3", 30), sampling=SamplingParams(n=2))))
            await asyncio.sleep(2)
            assert fair.waiting == 1
            with pytest.raises(ConflictError, match="a-3"):
                await answer(fair, request("a-3"))
            assert await fair.abort("a-3")
            ends = await waiting
            assert {(chunk.index, chunk.finish_reason) for chunk in ends} <= {(0, "abort"), (1, "abort")}
            assert ends[-1].usage is not None
            assert not await fair.abort("a-3")
            assert await fair.abort("a-1")
            assert (await running)[-1].finish_reason == "abort"
            assert text_of(await spare) == expected(30)

    run_virtually(body())


def test_a_drain_lets_all_end_and_refuses_what_still_waits_after_its_time() -> None:
    async def body(timeout_s: float, finished: int) -> None:
        async with admission(max_running=1) as (fair, _):
            asked = [asyncio.create_task(answer(fair, request(f"a-{n}", 10))) for n in range(4)]
            await asyncio.sleep(1.5)
            draining = asyncio.create_task(fair.drain(timeout_s))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await answer(fair, request("b-1"))
            await draining
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert sum(isinstance(each, OverloadedError) for each in results) == 4 - finished
            assert [text_of(each) for each in results if isinstance(each, list)] == [expected(10)] * finished

    run_virtually(body(100.0, 4))
    run_virtually(body(15.0, 3))


def test_a_dead_engine_ends_all_that_wait() -> None:
    async def body() -> None:
        async with admission(max_running=1, die_on="\x09") as (fair, _):
            asked = [asyncio.create_task(answer(fair, request(f"a-{n}", 10))) for n in range(4)]
            await asyncio.sleep(0.5)
            killer = asyncio.create_task(answer(fair, replace(request("b-1"), prompt=[9, 9])))
            results = await asyncio.gather(*asked, killer, return_exceptions=True)
            assert all(isinstance(each, EngineDeadError) or each[-1].finish_reason for each in results)  # type: ignore[index]
            assert any(isinstance(each, EngineDeadError) for each in results)

    run_virtually(body())


def test_the_cached_tokens_of_a_request_that_was_taken_out_are_those_of_its_first_start() -> None:
    async def body() -> None:
        async with admission(max_running=2) as (fair, _):
            heavy = [asyncio.create_task(answer(fair, request(f"a-{n}", 40, prompt=8 + n))) for n in range(2)]
            await asyncio.sleep(3)
            await answer(fair, request("b-1", 5, prompt=3))
            usages = [chunks[-1].usage for chunks in await asyncio.gather(*heavy)]
            assert [usage.cached_tokens for usage in usages if usage] == [0, 8]

    run_virtually(body())


def test_what_gave_way_comes_back_to_the_engine_as_one_that_did() -> None:
    """The engine's own queue would serve it before the request for which it left."""

    class RecordingEngine:
        def __init__(self, engine: FakeEngine) -> None:
            self.abort, self.generate_alone, self.asked = engine.abort, engine.generate, list[GenRequest]()

        def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
            self.asked.append(request)
            return self.generate_alone(request)

    async def body() -> None:
        async with admission(max_running=1) as (_, engine):
            recording = RecordingEngine(engine)
            fair = FairAdmission(recording, await engine.start(), DirectOutput())
            low = asyncio.create_task(answer(fair, request("a-low", 10, priority=1)))
            await asyncio.sleep(3)
            await answer(fair, request("b-high", 2, priority=-1))
            await low
            assert [(each.request_id, each.gave_way) for each in recording.asked] == [
                ("a-low", False),
                ("b-high", False),
                ("a-low", True),
            ]

    run_virtually(body())


class SteppedEngine(FakeEngine):
    """Ends an aborted request a second later, as at the end of a step. `seen` has the time, kind and team of calls."""

    def __init__(self, **options: float) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.seen: list[tuple[float, str, str]] = []

    def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        self._note("generate", request.request_id)
        return super().generate(request)

    async def abort(self, request_id: str) -> bool:
        self._note("abort", request_id)
        await asyncio.sleep(1.0)
        return await super().abort(request_id)

    def _note(self, kind: str, request_id: str) -> None:
        self.seen.append((asyncio.get_running_loop().time(), kind, request_id.partition("-")[0]))


def test_one_for_which_others_leave_reaches_the_engine_in_the_same_step_as_they_are_asked_to() -> None:
    """It would miss a step if it waited until they have left, which an engine says only after its step."""

    async def body() -> None:
        loop = asyncio.get_running_loop()
        engine = SteppedEngine(max_running=2, max_waiting=8, tokens_per_s=1.0)
        fair = FairAdmission(engine, await engine.start(), DirectOutput())
        heavy = [asyncio.create_task(answer(fair, request(f"heavy-{n}", 40))) for n in range(2)]
        await asyncio.sleep(5.5)
        at_s, known = loop.time(), len(engine.seen)
        assert text_of(await answer(fair, request("light-1"))) == expected(20)
        assert sorted(engine.seen[known : known + 2]) == [(at_s, "abort", "heavy"), (at_s, "generate", "light")]
        assert [text_of(chunks) for chunks in await asyncio.gather(*heavy)] == [expected(40)] * 2
        await engine.shutdown()

    run_virtually(body())


def test_requests_that_come_while_others_leave_a_full_engine_are_not_refused() -> None:
    """Those that leave are still in the engine, and some of the queue would otherwise go there in their places."""

    async def body() -> None:
        engine = SteppedEngine(max_running=4, max_waiting=4, tokens_per_s=1.0)
        fair = FairAdmission(engine, await engine.start(), DirectOutput())
        heavy = [asyncio.create_task(answer(fair, request(f"heavy-{n}", 40))) for n in range(8)]
        await asyncio.sleep(5.5)
        light = [asyncio.create_task(answer(fair, request(f"light-{n}"))) for n in range(3)]
        assert [text_of(chunks) for chunks in await asyncio.gather(*light)] == [expected(20)] * 3
        ended = await asyncio.gather(*heavy, return_exceptions=True)
        assert {text_of(each) for each in ended if isinstance(each, list)} == {expected(40)}
        await engine.shutdown()

    run_virtually(body())


def test_an_engine_that_does_not_tell_its_places_gets_all_at_once() -> None:
    async def body() -> None:
        engine = FakeEngine(max_running=2, tokens_per_s=1.0)
        fair = FairAdmission(engine, replace(await engine.start(), max_running=0), DirectOutput())
        asked = [asyncio.create_task(answer(fair, request(f"a-{n}", 3))) for n in range(5)]
        await asyncio.sleep(0.5)
        assert ((await engine.stats()).waiting, fair.waiting) == (3, 0)
        await asyncio.gather(*asked)

    run_virtually(body())


SLO_S = 10.0


async def burst(fair: FairAdmission, *, teams: str = "a", waited_s: float = 0.0) -> dict[str, list[float]]:
    """Returns the times to first tokens by team: each has sixty requests at once on four places of four seconds, and
    then, with the other teams, four in five seconds, of the five that these serve.
    """
    waits_s: dict[str, list[float]] = {team: [] for team in teams}

    async def ask(team: str, number: int, before_s: float) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time() - before_s
        async with aclosing(fair.generate(request(f"{team}-{number}", 4), before_s)) as chunks:
            async for chunk in chunks:
                if chunk.token_ids:
                    waits_s[team].append(loop.time() - began_s)
                    break
            async for _ in chunks:
                pass

    tasks = [asyncio.create_task(ask(team, number, waited_s)) for number in range(60) for team in teams]
    for number in range(60, 240):
        await asyncio.sleep(1.25)
        tasks.append(asyncio.create_task(ask(teams[number % len(teams)], number, 0.0)))
    await asyncio.gather(*tasks)
    return waits_s


def in_time(waits_s: list[float]) -> int:
    return sum(waited_s <= SLO_S for waited_s in waits_s)


def test_in_a_burst_requests_that_are_late_anyway_make_no_others_late() -> None:
    async def body() -> None:
        async with admission(max_running=4, max_waiting=1000) as (fair, _):
            first_come = (await burst(fair))["a"]
        async with admission(max_running=4, max_waiting=1000, slo_ttft_s=SLO_S) as (fair, _):
            by_deadline = (await burst(fair))["a"]
        assert len(first_come) == len(by_deadline) == 240  # all are served
        assert in_time(first_come) < 20
        assert in_time(by_deadline) > 170

    run_virtually(body())


def test_the_time_that_a_request_has_waited_elsewhere_counts() -> None:
    async def body() -> None:
        async with admission(max_running=4, max_waiting=1000, slo_ttft_s=SLO_S) as (fair, _):
            waits_s = (await burst(fair, waited_s=SLO_S))["a"]
        assert 160 < in_time(waits_s) <= 180  # none of the sixty

    run_virtually(body())


def test_by_deadline_teams_share_as_they_do_first_come() -> None:
    async def body() -> None:
        async with admission(max_running=4, max_waiting=1000, slo_ttft_s=SLO_S) as (fair, _):
            waits_s = await burst(fair, teams="ab")
        assert abs(in_time(waits_s["a"]) - in_time(waits_s["b"])) <= 4

    run_virtually(body())


class VllmLike(FakeEngine):
    """Cannot continue what vLLM cannot."""

    def can_resume(self, request: GenRequest) -> bool:
        return not lost_on_resume(request.sampling)

    def _admit(self, request: GenRequest) -> Any:
        check_request(request)
        return super()._admit(request)


def test_what_the_engine_cannot_resume_is_not_taken_out() -> None:
    async def body() -> None:
        engine = VllmLike(max_running=2, max_waiting=256, tokens_per_s=1.0)
        fair = FairAdmission(engine, await engine.start(), DirectOutput(), engine.can_resume)
        seeded = SamplingParams(temperature=0.5, seed=3, max_tokens=30)
        heavy = [asyncio.create_task(answer(fair, request(f"heavy-{n}", sampling=seeded))) for n in range(2)]
        await asyncio.sleep(5.5)
        light = asyncio.create_task(answer(fair, request("light-1", 5)))
        assert [text_of(each) for each in await asyncio.gather(*heavy)] == [expected(30)] * 2
        assert text_of(await light) == expected(5)
        await engine.shutdown()

    run_virtually(body())
