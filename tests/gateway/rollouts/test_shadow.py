"""Shadow traffic: a challenger gets copies, whose answers are compared and never reach a user."""

from __future__ import annotations

import asyncio

import pytest
from tests.gateway.conftest import Gateway, running_gateway, until
from tests.gateway.rollouts.test_canary_traffic import ask, begin, counted, text_of
from tests.gateway.test_metrics import value

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.serving.openai_api.admission import Anybody, Grant
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import ChatRequest
from raytide.gateway.rollouts import shadow
from raytide.gateway.rollouts.counting import RevisionTally
from raytide.gateway.rollouts.shadow import ShadowTraffic


def compared(gateway: Gateway) -> tuple[int, int]:
    (found,) = (each for each in gateway.models.counted() if each.revision == 2)
    return found.compared, found.equal


@pytest.mark.parametrize(("reply", "equal"), [("old ", 6), ("new ", 0)])
async def test_every_answer_is_the_champions_and_greedy_ones_are_compared(reply: str, equal: int) -> None:
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply=reply), percent=0.0, shadow=100.0)
        answers = [await ask(gateway, f"hello {number}", temperature=0) for number in range(5)]
        answers.append(await ask(gateway, "two", temperature=0, n=2))
        sampled = await ask(gateway, "sampled", temperature=1)
        stream = await ask(gateway, "streamed", temperature=1, stream=True)
        assert {text_of(each) for each in (*answers, sampled)} == {"old "}
        assert {each.headers["x-raytide-revision"] for each in (*answers, stream)} == {"1"}

        async def are_counted() -> bool:
            return counted(gateway)[2][0] == 8 and compared(gateway) == (6, equal)

        await until(are_counted)
        assert counted(gateway)[1] == (8, 0, 8, 0)
        shown = {"true": equal, "false": 6 - equal}
        for is_equal, count in shown.items():
            assert value(gateway, "raytide_shadow_answers_total", endpoint="chat", equal=is_equal) == count


async def test_a_broken_challenger_costs_nothing_and_its_failures_are_counted() -> None:
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(fail_on="hello"), percent=0.0, shadow=100.0)
        assert [text_of(await ask(gateway, f"hello {number}", temperature=0)) for number in range(3)] == ["old "] * 3

        async def are_counted() -> bool:
            return counted(gateway)[2][:2] == (3, 3)

        await until(are_counted)
        assert compared(gateway) == (0, 0)
        assert counted(gateway)[1][:2] == (3, 0)


async def test_a_slow_challenger_holds_up_no_answer_and_gets_so_many_copies_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shadow, "_MOST_COPIES", 2)
    async with running_gateway() as gateway:
        slow = FakeEngine(reply="old ", tokens_per_s=0.01)
        await begin(gateway, slow, percent=0.0, shadow=100.0)
        answers = await asyncio.gather(*(ask(gateway, f"hello {number}") for number in range(5)))
        assert {text_of(each) for each in answers} == {"old "}
        assert len(gateway.models._shadows._copies) == 2


class Spent(Anybody):
    """A caller whose budget is spent."""

    async def admit(self, *_: object, **__: object) -> Grant:
        raise ApiError(429, "The budget is spent.", type="insufficient_quota", code="insufficient_quota")


async def test_a_request_that_is_not_admitted_is_not_copied() -> None:
    traffic, tally = ShadowTraffic(), RevisionTally(7, 2)
    champion, challenger = (Server(FakeEngine(reply="old "), model="chat") for _ in range(2))
    for server in (champion, challenger):
        await server.start()
    body = ChatRequest.model_validate({"model": "chat", "messages": [{"role": "user", "content": "hello"}]})
    asked = traffic.copied(champion, challenger, body, Spent(), tally)
    with pytest.raises(ApiError, match="spent"):
        await asked.generate(body, Spent())
    assert not traffic._copies
    await traffic.close()


async def test_a_share_of_requests_is_copied() -> None:
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply="old "), percent=0.0, shadow=30.0)
        for number in range(100):
            await ask(gateway, f"hello {number}", temperature=0)

        async def are_over() -> bool:
            return not gateway.models._shadows._copies

        await until(are_over)
        assert 10 <= compared(gateway)[0] <= 55
