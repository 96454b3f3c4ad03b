"""A share of the answers is measured by the log probabilities of their tokens, and no client sees a difference."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import pytest
from tests.gateway.conftest import running_gateway
from tests.gateway.test_metrics import ask, value

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import GenChunk, GenRequest, TokenLogprobs
from raytide.gateway.answers import answer_quality
from raytide.gateway.answers.answer_quality import AnswerQuality


class Model:
    """Answers two tokens, each with the given log probability if they are asked for."""

    def __init__(self, logprob: float = -0.5) -> None:
        self.logprob, self.asked = logprob, list[int | None]()

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        self.asked.append(request.sampling.logprobs)
        for token in (7, 8):
            figures = (TokenLogprobs(token, self.logprob, 1),) if request.sampling.logprobs is not None else None
            yield GenChunk(request.request_id, [token], "x", logprobs=figures)


async def answers(
    quality: AnswerQuality, model: Model, count: int = 1, *, able: bool = True, **params: int
) -> list[GenChunk]:
    generate = quality.measured(model.generate, lambda: able)
    asked = [GenRequest(request_id=str(i), prompt=[1], sampling=SamplingParams(**params)) for i in range(count)]
    return [chunk for request in asked for chunk in [each async for each in generate(request)]]


async def test_the_mean_is_over_the_tokens_of_the_last_hour() -> None:
    now_s = [0.0]
    quality = AnswerQuality(1.0, lambda: now_s[0])
    assert quality.mean_logprob is None
    for at_s, logprob in ((0.0, -3.0), (3000.0, -1.0), (3600.0, -2.0)):
        now_s[0] = at_s
        await answers(quality, Model(logprob))
    assert quality.mean_logprob == pytest.approx(-2.0)
    now_s[0] = 3601.0
    assert quality.mean_logprob == pytest.approx(-1.5)


async def test_what_the_client_did_not_ask_for_is_not_sent() -> None:
    model = Model()
    hidden, shown = await answers(AnswerQuality(1.0), model), await answers(AnswerQuality(1.0), model, logprobs=2)
    assert model.asked == [0, 2]
    assert [chunk.logprobs for chunk in hidden] == [None, None]
    assert all(chunk.logprobs for chunk in shown)


async def test_about_the_share_is_measured_and_none_where_the_engine_cannot() -> None:
    model = Model()
    await answers(AnswerQuality(0.1), model, 2000)
    assert 120 < sum(asked is not None for asked in model.asked) < 280  # 6 sigma
    unable = Model()
    await answers(quality := AnswerQuality(1.0), unable, able=False)
    assert (unable.asked, quality.mean_logprob) == ([None], None)


async def test_the_gateway_shows_the_perplexity_of_each_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_quality.random, "random", lambda: 0.0)
    async with running_gateway() as gateway:
        await gateway.deploy("tide", FakeEngine())
        assert value(gateway, "raytide_served_perplexity") == 0, "no answer, no figure"
        assert await ask(gateway, "tide") == 200
        assert value(gateway, "raytide_served_perplexity", endpoint="tide") == 1, "the fake engine is certain"
        gateway.models._applications["tide"].metrics.served_logprob = lambda: -2.0
        assert value(gateway, "raytide_served_perplexity", endpoint="tide") == pytest.approx(math.exp(2))
