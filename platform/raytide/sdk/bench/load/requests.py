"""The requests of a load: prompts, lengths and arrival times. They depend on the spec alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from raytide.core.errors import DataError
from raytide.sdk.bench.load.spec import BenchSpec

FIRST_TOKEN, LAST_TOKEN = 3, 255
"""Random prompts use these token ids, which every vocabulary of bytes has; smaller ones are often special."""
MOONCAKE_BLOCK = 512
"""The number of tokens for which each id in a Mooncake trace's `hash_ids` stands."""
_TEXT = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how said an each she which do their time if will"
)
WORDS = _TEXT.split()
"""Words for text prompts. Most tokenizers have one token for each of them."""
_ARRIVALS, _LENGTHS, _PROMPTS, _BLOCKS, _WARM_UP = range(5)
"""Independent streams of random numbers: a draw from one does not change the numbers of another."""

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt: Prompt
    output_tokens: int
    at_s: float | None = None
    """The time to send it, from the start; None in a closed loop, which sends it when another one has ended."""

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt in tokens. It is 0 for a text prompt, whose tokens only the server can count."""
        return 0 if isinstance(self.prompt, str) else len(self.prompt)

    def body(self, spec: BenchSpec) -> dict[str, Any]:
        """Returns the JSON body of the request. In a chat, the prompt is a single user message."""
        fields: dict[str, Any] = {"model": spec.model, "stream": True, "stream_options": {"include_usage": True}}
        if spec.api == "chat":
            text = self.prompt if isinstance(self.prompt, str) else in_words(self.prompt)
            fields |= {
                "messages": [{"role": "user", "content": text}],
                "max_completion_tokens": self.output_tokens,
            }
        else:
            fields |= {"prompt": self.prompt, "max_tokens": self.output_tokens}
        if spec.ignore_eos:
            fields["ignore_eos"] = True
        return {**fields, **spec.body}


def requests_of(spec: BenchSpec) -> Iterator[BenchRequest]:
    """Yields the requests of a load in the order of arrival. Raises DataError for a file that cannot be read."""
    made = _traced(spec) if spec.trace is not None else _prompted(spec) if spec.prompts is not None else _random(spec)
    return islice(made, spec.most_requests)


def warm_up_of(spec: BenchSpec) -> Iterator[BenchRequest]:
    """Yields the warm-up requests. They are as long as the first measured requests, but have other prompts. The
    server's cache therefore contains no measured prompt.
    """
    for number, measured in enumerate(islice(requests_of(spec), spec.warmup)):
        is_text = isinstance(measured.prompt, str)
        length = len(measured.prompt.split() if isinstance(measured.prompt, str) else measured.prompt)
        tokens = _tokens(length, spec.seed, _WARM_UP, number)
        yield BenchRequest(in_words(tokens) if is_text else tokens, measured.output_tokens)


def in_words(tokens: Sequence[int]) -> str:
    """Returns a text with one word for each token. A server tokenizes the text to about the same number of tokens."""
    return " ".join(WORDS[token % len(WORDS)] for token in tokens)


def _random(spec: BenchSpec) -> Iterator[BenchRequest]:
    lengths = np.random.default_rng([spec.seed, _LENGTHS])
    for number, at_s in zip(count(), _arrivals_s(spec), strict=False):
        prompt = int(lengths.integers(*spec.prompt_tokens, endpoint=True))
        output = int(lengths.integers(*spec.output_tokens, endpoint=True))
        yield BenchRequest(_tokens(prompt, spec.seed, _PROMPTS, number), output, at_s)


def _prompted(spec: BenchSpec) -> Iterator[BenchRequest]:
    lengths = np.random.default_rng([spec.seed, _LENGTHS])
    assert spec.prompts is not None
    for (prompt, tokens), at_s in zip(cycle(_prompts(Path(spec.prompts))), _arrivals_s(spec), strict=False):
        drawn = int(lengths.integers(*spec.output_tokens, endpoint=True))
        yield BenchRequest(prompt, tokens or drawn, at_s)


def _arrivals_s(spec: BenchSpec) -> Iterator[float | None]:
    """Yields the requests' times of arrival in seconds, the first at 0; None for each request of a closed loop."""
    if spec.rate is None:
        while True:
            yield None
    gaps = np.random.default_rng([spec.seed, _ARRIVALS])
    at_s = 0.0
    for number in count():
        if not spec.poisson:
            at_s = number / spec.rate
        elif number:
            at_s += float(gaps.exponential(1.0 / spec.rate))
        if spec.duration_s is not None and at_s > spec.duration_s:
            return
        yield at_s


def _traced(spec: BenchSpec) -> Iterator[BenchRequest]:
    assert spec.trace is not None
    rows = sorted(_trace_rows(Path(spec.trace)), key=lambda row: row.at_s)
    for number, row in enumerate(rows):
        at_s = (row.at_s - rows[0].at_s) / spec.trace_speed
        if spec.duration_s is not None and at_s > spec.duration_s:
            return
        length = max(1, round(row.prompt_tokens * spec.trace_scale))
        output = max(1, round(row.output_tokens * spec.trace_scale))
        prompt: Prompt
        if row.prompt:
            prompt = row.prompt
        else:
            block = max(1, round(MOONCAKE_BLOCK * spec.trace_scale))
            shared = [t for each in row.blocks[: math.ceil(length / block)] for t in _tokens(block, 0, _BLOCKS, each)]
            own = _tokens(max(0, length - len(shared)), spec.seed, _PROMPTS, number)
            prompt = [*shared[:length], *own]
        yield BenchRequest(prompt, output, at_s)


def _tokens(length: int, *stream: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(stream).integers(FIRST_TOKEN, LAST_TOKEN, length, endpoint=True).tolist()
    return drawn


@dataclass(frozen=True, slots=True)
class _TraceRow:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """The ids of the prompt's blocks: prompts that begin with the same ids begin with the same tokens."""
    prompt: str = ""


def _trace_rows(path: Path) -> list[_TraceRow]:
    if path.suffix == ".csv":
        from raytide.simulate import columns

        table = columns.read(path, ("t_s", "prompt_tokens", "output_tokens")).numbers
        triples = zip(*(table[name].tolist() for name in ("t_s", "prompt_tokens", "output_tokens")), strict=True)
        rows = [_TraceRow(at_s, int(prompt), int(output)) for at_s, prompt, output in triples]
    else:
        rows = [_trace_row(body, where) for where, body in _json_lines(path)]
    if not rows:
        raise DataError(f"{path} has no request.", hint="A line is a JSON object, one for each request.")
    return rows


def _trace_row(body: Mapping[str, Any], where: str) -> _TraceRow:
    try:
        if "timestamp" in body:  # Mooncake's names; its times are in milliseconds
            blocks = tuple(abs(int(each)) for each in body.get("hash_ids", ()))
            at_s = float(body["timestamp"]) / 1000.0
            return _TraceRow(at_s, int(body["input_length"]), int(body["output_length"]), blocks)
        row = float(body["t_s"]), int(body["prompt_tokens"]), int(body["output_tokens"])
        return _TraceRow(*row, prompt=str(body.get("prompt", "")))
    except (KeyError, TypeError, ValueError) as error:
        names = "timestamp, input_length and output_length, or t_s, prompt_tokens and output_tokens"
        raise DataError(f"{where} is no request of a trace: {error!r}.", hint=f"It needs {names}.") from None


def _prompts(path: Path) -> list[tuple[str, int]]:
    """Returns each prompt of the file with the number of tokens to generate; 0 where the file has no number."""
    if path.suffix != ".jsonl":
        found = [(line, 0) for line in _text(path).splitlines() if line.strip()]
    else:
        found = []
        for where, body in _json_lines(path):
            prompt, tokens = body.get("prompt"), body.get("output_tokens", 0)
            if not isinstance(prompt, str) or not prompt or not isinstance(tokens, int) or tokens < 0:
                raise DataError(f"{where} has no prompt.", hint='Write {"prompt": "...", "output_tokens": 64}.')
            found.append((prompt, tokens))
    if not found:
        raise DataError(f"{path} has no prompt.", hint="Write one in each line.")
    return found


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise DataError(f"{path}:{number} is no JSON object.", hint="Correct or remove the line.")
        yield f"{path}:{number}", body


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}.", hint="Check the path.") from None
