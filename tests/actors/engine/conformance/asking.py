"""The questions that the conformance suite asks, and what it reads from the answers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from raytide.actors.engine import EngineInfo, GenChunk, GenRequest, SamplingParams
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.base import Engine
from raytide.actors.engine.types import Feature

Start = Callable[..., Awaitable[tuple[Engine, EngineInfo]]]

PROMPT = list(range(10, 22))
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
STEP_S = 0.1


def need(info: EngineInfo, *features: Feature) -> None:
    missing = [feature for feature in features if feature not in info.features]
    if missing:
        pytest.skip(f"{info.backend} declares no {', '.join(missing)}")


def ask(
    name: str = "r", prompt: str | list[int] | None = None, sampling: SamplingParams = GREEDY, **more: object
) -> GenRequest:
    return GenRequest(request_id=name, prompt=PROMPT if prompt is None else prompt, sampling=sampling, **more)  # type: ignore[arg-type]


async def collect(engine: Engine, request: GenRequest) -> list[GenChunk]:
    return [chunk async for chunk in engine.generate(request)]


def tokens_of(chunks: list[GenChunk], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


def text_of(chunks: list[GenChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@contextmanager
def slow_steps(step_s: float = STEP_S) -> Iterator[None]:
    """Makes native engines take their time for a step. Their thread would otherwise complete a whole answer, endless or
    not, while the event loop is about to ask for something else.
    """
    step = EngineCore.step

    def slow(core: EngineCore) -> object:
        time.sleep(step_s)
        return step(core)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "step", slow)
        yield
