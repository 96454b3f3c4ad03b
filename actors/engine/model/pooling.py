"""Pooled prompts, whose output is one vector: an embedding from the hidden states, or the logits of a classification
head.

Pooled prompts share the schedule with sequences that generate, so one step computes both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from raytide.actors.engine.sequence import PooledPrompt, Pooling, ScheduledChunk, Sequence
from raytide.actors.models.model_config import Fields, read_json, read_text
from raytide.actors.models.quantized.gguf.gguf_file import GgufFile, is_gguf
from raytide.core.bounds import shortened
from raytide.core.errors import ConfigError, DataError, EngineError

Tensor = torch.Tensor

_MODULES = ("Transformer", "Pooling", "Normalize")


def pooling_of(model_dir: Path) -> Pooling:
    """Returns the pooling method that sentence-transformers recorded in the model directory, or that a GGUF file names.
    If nothing is recorded, the method is "last", since only the last token has seen the whole prompt.
    """
    if is_gguf(model_dir):
        return _pooling_of_gguf(model_dir, model_dir.stat().st_mtime_ns if model_dir.exists() else 0)
    _check_modules(model_dir / "modules.json")
    path = model_dir / "1_Pooling" / "config.json"
    if not path.exists():
        return "last"
    fields = Fields(read_json(path), str(path))
    by_flag: dict[str, Pooling] = {
        "pooling_mode_cls_token": "cls",  # a kind of token  # nosec B105
        "pooling_mode_lasttoken": "last",
        "pooling_mode_mean_tokens": "mean",
    }
    asked = [name for name in fields.body if name.startswith("pooling_mode_") and fields.flag(name, False)]
    if len(asked) != 1 or asked[0] not in by_flag:
        raise ConfigError(
            f"{path}: {' and '.join(asked) or 'no pooling'} is not supported.",
            hint=f"Supported: one of {', '.join(by_flag)}.",
        )
    return by_flag[asked[0]]


def _check_modules(path: Path) -> None:
    """Raises ConfigError if sentence-transformers computes a vector by more than the model, its pooling and its norm,
    such as by a last linear layer.
    """
    try:
        modules = json.loads(read_text(path)) if path.exists() else []
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}.", hint="Download the model again.") from None
    kinds = [
        str(each.get("type")).rpartition(".")[2]
        for each in (modules if isinstance(modules, list) else ())
        if isinstance(each, dict)
    ]
    if unknown := [kind for kind in kinds if kind not in _MODULES]:
        raise ConfigError(
            f"{path}: the module {shortened(unknown[0], 50)} is not supported.",
            hint=f"Supported: {', '.join(_MODULES)}.",
        )


@lru_cache(maxsize=16)  # each request asks, and reading the header of a large vocabulary takes a while
def _pooling_of_gguf(path: Path, changed_ns: int) -> Pooling:
    file = GgufFile(path)
    field = f"{file.text('general.architecture')}.pooling_type"
    by_number: dict[int | float, Pooling] = {0: "last", 1: "mean", 2: "cls", 3: "last"}  # 0: none is recorded
    number = file.number(field, 0)
    if number not in by_number:
        raise ConfigError(f"{file.where}: {field} {number} is not supported.", hint="Supported: mean, cls, last.")
    return by_number[number]


def pooled_vector(seq: Sequence) -> list[float]:
    """Returns the output vector of a fully computed prompt. Raises EngineError if the vector is not finite."""
    prompt = seq.pooled
    assert prompt is not None
    total = torch.stack(list(prompt.sums.values())).sum(0)
    pooled = (total / seq.prompt_len if prompt.pooling == "mean" else total).float()
    if not bool(torch.isfinite(pooled).all()):
        raise EngineError("the model's hidden states are not finite.", hint="Check its weights and its dtype.")
    if prompt.normalize and not prompt.classify:
        pooled = torch.nn.functional.normalize(pooled, dim=-1)
    values: list[float] = pooled.tolist()
    return values


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The rows of a step's flat batch whose states are pooled."""

    chunks: list[tuple[PooledPrompt, int, int]]  # with the first position of a chunk, and the number of its rows
    rows: list[int]

    @classmethod
    def of(cls, chunks: Items[ScheduledChunk]) -> PooledRows:
        pooled, rows, offset = list[tuple[PooledPrompt, int, int]](), list[int](), 0
        for chunk in chunks:
            prompt = chunk.seq.pooled
            if prompt is not None and (wanted := _wanted(chunk, prompt.pooling)):
                pooled.append((prompt, chunk.start, len(wanted)))
                rows += [offset + row for row in wanted]
            offset += chunk.length
        return cls(pooled, rows)

    def record(self, states_RN: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        """Adds the rows' hidden states to the sums of their prompts. If a prompt is to be classified, `head` first
        turns its hidden states into logits, and the logits are added.

        Each chunk of a prompt has its own sum. If a chunk is recorded a second time, its sum is replaced, and the sums
        of later chunks are dropped. A chunk may therefore be repeated, and a prompt can restart after an eviction.
        """
        at = 0
        for prompt, start, count in self.chunks:
            states = states_RN[at : at + count]
            total = (head(states) if prompt.classify else states).sum(0, dtype=torch.float64)
            prompt.sums = {first: each for first, each in prompt.sums.items() if first < start} | {start: total}
            at += count


def _wanted(chunk: ScheduledChunk, pooling: Pooling) -> range:
    """Returns the rows of a chunk whose hidden states are pooled."""
    if pooling == "mean":
        return range(chunk.length)
    if pooling == "cls":
        return range(int(chunk.start == 0))
    is_last = chunk.start + chunk.length == chunk.seq.prompt_len
    return range(chunk.length - int(is_last), chunk.length)
