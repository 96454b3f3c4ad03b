"""The demo's load: concurrent streaming requests with the official OpenAI client, each timed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

PROMPTS = (
    "def main(",
    "import os",
    "class Node:",
    '"""Return the',
    "for i in range(",
    "try:\n    ",
    "from collections import",
    "    def __init__(self",
)
MAX_TOKENS = 192


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_s: float
    """The time from sending the request to its first token."""
    took_s: float
    tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    answers: tuple[Answer, ...]
    took_s: float

    @property
    def failed(self) -> int:
        return sum(1 for answer in self.answers if answer.error)

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.took_s

    @property
    def ttft_median_s(self) -> float:
        """The median time to first token; NaN if no request was answered."""
        return median(self._ttfts_s or (float("nan"),))

    @property
    def ttft_slowest_s(self) -> float:
        return max(self._ttfts_s, default=float("nan"))

    @property
    def _ttfts_s(self) -> list[float]:
        return [answer.ttft_s for answer in self.answers if not answer.error]


def send(base_url: str, model: str, *, concurrency: int) -> LoadReport:
    """Sends one wave of `concurrency` streams at once and returns the measurements."""
    return asyncio.run(_wave(base_url, model, concurrency))


async def _wave(base_url: str, model: str, concurrency: int) -> LoadReport:
    from openai import AsyncOpenAI

    started_s = time.monotonic()
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120.0) as client:
        answers = await asyncio.gather(*(_ask(client, model, PROMPTS[i % len(PROMPTS)]) for i in range(concurrency)))
    return LoadReport(tuple(answers), time.monotonic() - started_s)


async def _ask(client: AsyncOpenAI, model: str, prompt: str) -> Answer:
    from openai import OpenAIError

    started_s = time.monotonic()
    first_s, tokens = 0.0, 0
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            temperature=0.8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            first_s = first_s or time.monotonic() - started_s
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
    except OpenAIError as error:
        return Answer(first_s, time.monotonic() - started_s, tokens, error=str(error) or type(error).__name__)
    return Answer(first_s, time.monotonic() - started_s, tokens)
