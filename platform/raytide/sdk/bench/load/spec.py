"""The spec of a load: its target, the arrival of requests, their lengths, and the SLO."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from raytide.core.config import Config

MOST_TOKENS = 10_000_000
DEFAULT_CONCURRENCY = 8
DEFAULT_REQUESTS = 100
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}


def parse_lengths(value: object) -> object:
    """Returns the range of token counts that a text describes: `512` is (512, 512), and `128:1024` is (128, 1024)."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+)(?::(\d+))?", value)):
        low, high = found.groups()
        return int(low), int(high or low)
    return value


def _ordered(lengths: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= lengths[0] <= lengths[1] <= MOST_TOKENS:
        raise ValueError(f"a length is a number of tokens, or a range such as 128:1024, up to {MOST_TOKENS}")
    return lengths


Lengths = Annotated[tuple[int, int], BeforeValidator(parse_lengths), AfterValidator(_ordered)]
"""The fewest and the most tokens; a request has any number between them with equal probability."""


class Slo(Config):
    """The latency objectives of one request, in seconds. Goodput counts the requests that met all objectives."""

    ttft_s: float | None = Field(default=None, gt=0)
    """The time to the first token."""
    tpot_s: float | None = Field(default=None, gt=0)
    """The mean time of each further token."""
    e2e_s: float | None = Field(default=None, gt=0)
    """The time of the whole request."""

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parses objectives such as `ttft=300ms,tpot=40ms,e2e=5s`. A number without a unit is in seconds."""
        fields: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            found = re.fullmatch(r"(ttft|tpot|e2e)=(\d+\.?\d*|\.\d+)(us|ms|s|)", part)
            if found is None:
                raise ValueError(f"{part!r} is no objective: write ttft=300ms,tpot=40ms,e2e=5s")
            name, number, unit = found.groups()
            fields[f"{name}_s"] = float(number) * _UNITS_S[unit]
        return cls(**fields)

    @property
    def is_empty(self) -> bool:
        return self.ttft_s is self.tpot_s is self.e2e_s is None

    def __str__(self) -> str:
        names = (("first token", self.ttft_s), ("token", self.tpot_s), ("end to end", self.e2e_s))
        return ", ".join(f"{name} {1e3 * bound:g} ms" for name, bound in names if bound is not None)


class BenchSpec(Config):
    """A load on one model behind an OpenAI-compatible server.

    Requests arrive in a closed loop (`concurrency`), in an open loop (`rate`), or at the times of a recorded `trace`.
    """

    base_url: str = Field(pattern=r"^https?://")
    """The address for OpenAI clients, which ends with `/v1`."""
    model: str = Field(min_length=1)
    api: Literal["completions", "chat"] = "completions"
    """The route. Prompts for `completions` are token ids, so that their lengths are exact; a chat has words."""
    concurrency: int | None = Field(default=None, ge=1, le=20_000)
    """Closed loop: that many requests are always open; the next one is sent when one has ended."""
    rate: float | None = Field(default=None, gt=0, le=1e6)
    """Open loop: requests a second, however many are still open."""
    poisson: bool = False
    """True for exponential gaps between the requests of `rate`, False for constant ones."""
    trace: str | None = None
    """A file of recorded requests: JSON lines in Mooncake's format or with `t_s`, `prompt_tokens` and `output_tokens`,
    or a CSV file with those columns."""
    trace_speed: float = Field(default=1.0, gt=0, le=1e6)
    """The factor by which the trace is sent faster than it was recorded."""
    trace_scale: float = Field(default=1.0, gt=0, le=100)
    """The factor by which the lengths in the trace are multiplied."""
    requests: int | None = Field(default=None, ge=1, le=10_000_000)
    """The number of requests. If neither it nor `duration_s` is given, it is 100, or all requests of a trace."""
    duration_s: float | None = Field(default=None, gt=0, le=7 * 86_400)
    """The time after which no more requests are sent. Those that are open are still waited for."""
    prompt_tokens: Lengths = (512, 512)
    output_tokens: Lengths = (128, 128)
    prompts: str | None = None
    """A file of prompts instead of random ones: one in each line, or JSON lines with `prompt` and perhaps
    `output_tokens`. They are sent in their order, from the start again after the last."""
    ignore_eos: bool = True
    """True to request exactly `output_tokens`, which raytide and vLLM support; set it to False for other servers."""
    body: Mapping[str, Any] = Field(default_factory=dict)
    """More fields of each request's body, such as `temperature`."""
    warmup: int = Field(default=DEFAULT_CONCURRENCY, ge=0, le=100_000)
    """Requests that are sent and answered before the measurement begins."""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """The time after which a request counts as failed."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    slo: Annotated[Slo, BeforeValidator(lambda value: Slo.from_text(value) if isinstance(value, str) else value)] = (
        Field(default_factory=Slo)
    )

    @model_validator(mode="after")
    def _has_one_arrival(self) -> Self:
        chosen = [name for name in ("concurrency", "rate", "trace") if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} exclude each other: a load has one way to arrive")
        if self.poisson and self.rate is None:
            raise ValueError("poisson needs a rate")
        if self.trace is not None and self.prompts is not None:
            raise ValueError("trace and prompts exclude each other: a trace says how long its prompts are")
        return self

    @property
    def in_flight(self) -> int | None:
        """The constant number of open requests in a closed loop. None in an open loop or for a trace."""
        if self.rate is not None or self.trace is not None:
            return None
        return self.concurrency or DEFAULT_CONCURRENCY

    @property
    def most_requests(self) -> int | None:
        """The number of requests. None if only the duration or the end of the trace limits the load."""
        if self.requests is None and self.duration_s is None and self.trace is None:
            return DEFAULT_REQUESTS
        return self.requests

    def __str__(self) -> str:
        if self.trace is not None:
            load = f"trace {self.trace}" + (
                f" at {self.trace_speed:g} times its speed" if self.trace_speed != 1 else ""
            )
        elif self.rate is not None:
            load = f"open loop, {self.rate:g} requests/s{', Poisson' if self.poisson else ''}"
        else:
            load = f"closed loop, {self.in_flight} at once"
        parts = [load]
        if self.trace is None:
            source = f"prompts of {self.prompts}" if self.prompts else f"prompts {_shown(self.prompt_tokens)} tokens"
            parts += [source, f"answers {_shown(self.output_tokens)} tokens"]
        return ", ".join([*parts, f"seed {self.seed}"])


def _shown(lengths: tuple[int, int]) -> str:
    return f"{lengths[0]}" if lengths[0] == lengths[1] else f"{lengths[0]} to {lengths[1]}"
