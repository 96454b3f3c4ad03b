"""The sampling parameters of a request. They are validated here, so that nothing invalid reaches a running batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

from raytide.actors.engine.limits import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_WORD_CHARS,
)
from raytide.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Structured:
    """A constraint on the output. `spec` is the text of a JSON schema ("" allows any JSON value), a regular expression,
    an EBNF grammar, or a tuple of choices.
    """

    kind: Literal["json_schema", "regex", "grammar", "choice"]
    spec: str | tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind == "choice":
            is_fit = isinstance(self.spec, tuple) and bool(self.spec) and all(self.spec)
            _require(is_fit, "structured", self, "of a tuple of non-empty choices")
        else:
            is_fit = isinstance(self.spec, str) and bool(self.spec or self.kind == "json_schema")
            _require(is_fit, "structured", self, f"of the text of a {self.kind}")

    @property
    def size(self) -> int:
        """The size of the constraint in characters. For a tuple of choices, the size includes the four characters that
        the grammar puts around each choice.
        """
        return len(self.spec) if isinstance(self.spec, str) else sum(len(choice) + 4 for choice in self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The rules by which each next token is chosen, and the conditions under which the output stops.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 disable these filters. If `seed` is set, the tokens
    depend only on the prompt, the parameters and the seed, not on the batch. If `max_tokens` is None, the output may
    fill the context. The presence and frequency penalties follow OpenAI and count the output. The repetition penalty
    follows CTRL (arXiv 1909.05858) and counts prompt and output.

    `logprobs` k requests the log probabilities of the chosen token and of the k most likely tokens. They are the
    model's own, before penalties, bias, temperature and filters. `prompt_logprobs` requests the same for each prompt
    token. If `best_of` is set, that many samples run, and the `n` samples with the highest mean log probability are
    returned.

    Before `min_tokens` tokens, no end token and no stop token is chosen, and stop strings are ignored. But if the
    grammar allows nothing more, the output ends all the same.
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Items[str] = ()
    stop_token_ids: Items[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_words: Items[str] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: Structured | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "bad_words", tuple(self.bad_words or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1, or None")
        _require(0.0 <= self.temperature < math.inf, "temperature", self.temperature, "0 (greedy) or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "from 0 to 1")
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        for name, most in (("stop", MAX_STOPS), ("bad_words", MAX_BAD_WORDS), ("stop_token_ids", MAX_STOP_TOKEN_IDS)):
            count = len(getattr(self, name))
            _require(count <= most, f"number of {name}", count, f"at most {most}")
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "size of logit_bias",
            len(self.logit_bias),
            f"at most {MAX_LOGIT_BIAS}",
        )
        longest = max((len(s) for s in (*stop, *self.bad_words) if isinstance(s, str)), default=0)
        _require(longest <= MAX_WORD_CHARS, "longest stop or bad word", longest, f"at most {MAX_WORD_CHARS} characters")
        _require(all(isinstance(s, str) and s for s in stop), "stop", stop, "non-empty strings")
        _require(
            all(isinstance(s, str) and s for s in self.bad_words), "bad_words", self.bad_words, "non-empty strings"
        )
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        within = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _require(within, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _require(
            all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values()),
            "logit_bias",
            self.logit_bias,
            "-100 to 100",
        )
        _require(self.n >= 1, "n", self.n, "at least 1")
        _require(self.best_of is None or self.best_of >= self.n, "best_of", self.best_of, f"at least n ({self.n})")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or 0 <= count <= MAX_LOGPROBS, name, count, f"0 to {MAX_LOGPROBS}, or None")
        _require(0.0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, getattr(self, name), "from -2 to 2")

    @property
    def num_samples(self) -> int:
        """The number of sequences that run for the request."""
        return self.best_of or self.n

    @property
    def needs_logprobs(self) -> bool:
        """True if the request returns log probabilities of the chosen tokens, or needs them to rank its samples."""
        return self.logprobs is not None or self.num_samples > self.n

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        shown = repr(value)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        raise UsageError(f"sampling parameter {name} is {shown}.", hint=f"{name} must be {allowed}.")
