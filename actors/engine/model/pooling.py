"""Prompts computed whole, apart from the schedule and with temporary KV memory: the logits of every position, and
embeddings, which pool a prompt's last hidden states into one vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.actors.engine.model.lora import Adapter, LoraRows
from raytide.actors.models.model_config import Fields, read_json
from raytide.core.errors import ConfigError
from raytide.kernels.core import PagedBatch

Tensor = torch.Tensor
Pooling = Literal["cls", "last", "mean"]


def pooling_of(model_dir: Path) -> Pooling:
    """Returns the pooling that sentence-transformers recorded in the directory; else that of the last token, the only
    one that has seen the whole prompt.
    """
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


def groups(prompts: list[list[int]], max_tokens: int) -> Iterator[list[list[int]]]:
    """Yields the prompts in order, in groups of at most `max_tokens` (or of one longer prompt)."""
    group: list[list[int]] = []
    for prompt in prompts:
        if group and sum(map(len, group)) + len(prompt) > max_tokens:
            yield group
            group = []
        group.append(prompt)
    if group:
        yield group


class PromptRunner:
    """Computes prompts apart from running sequences, which wait: the caller bounds the number of tokens in a call."""

    def __init__(self, model: PagedDecoder, block_size: int, device: torch.device) -> None:
        self._model, self._block_size, self._device = model, block_size, device

    def logits(self, tokens: list[int]) -> Tensor:
        """Returns float32 logits [T, V]: row t follows the first t + 1 tokens."""
        return self._model.head(self._hidden([tokens]))

    def embed(
        self, prompts: list[list[int]], pooling: Pooling, normalize: bool = True, adapter: Adapter | None = None
    ) -> Tensor:
        """Returns float32 [B, N]: a vector for each prompt, of length 1 if `normalize`."""
        states_N = self._hidden(prompts, adapter).float().split([len(prompt) for prompt in prompts])
        if pooling == "mean":
            vectors_BN = torch.stack([states.mean(0) for states in states_N])
        else:
            vectors_BN = torch.stack([states[0 if pooling == "cls" else -1] for states in states_N])
        return F.normalize(vectors_BN, dim=-1) if normalize else vectors_BN

    def _hidden(self, prompts: list[list[int]], adapter: Adapter | None = None) -> Tensor:
        """Returns the last hidden states [T, N] of all prompts' tokens, prompt by prompt."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        blocks = -(-lengths // self._block_size)
        first_blocks = blocks.cumsum(0) - blocks
        # Rows are padded with the blocks of the next prompts, which nothing reads.
        tables_BM = (first_blocks[:, None] + torch.arange(int(blocks.max()))).clamp_(max=int(blocks.sum()) - 1)
        positions_T = torch.cat([torch.arange(length) for length in lengths.tolist()])
        batch = PagedBatch(
            query_lens=lengths.tolist(),
            context_lens=lengths.tolist(),
            block_tables_BM=tables_BM.to(self._device),
            slots_T=(positions_T + (first_blocks * self._block_size).repeat_interleave(lengths)).to(self._device),
            block_size=self._block_size,
        )
        ids_T = torch.tensor([token for prompt in prompts for token in prompt], device=self._device)
        cache = self._model.new_cache(int(blocks.sum()), self._block_size)
        rows_R = torch.arange(len(ids_T), device=self._device)
        loras = LoraRows.of([(adapter, len(ids_T))])
        return self._model.hidden(ids_T, positions_T.to(self._device), batch, cache, rows_R, loras)
