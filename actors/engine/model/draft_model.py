"""A small draft model for speculative decoding. It guesses the next tokens of a large model with the same
vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path

import torch

from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.actors.engine.model.input_batch import InputBatch
from raytide.actors.engine.scheduler.step_cost import StepCost
from raytide.actors.engine.sequence import ScheduledChunk, Sequence
from raytide.actors.models.architecture import Architecture
from raytide.actors.models.model_config import read_json
from raytide.core.errors import ConfigError

_CATCH_UP_TOKENS = 256
"""The most tokens, of all sequences together, that one step computes to catch up with the large model."""


class DraftModel:
    """Guesses the most likely next tokens, one after the other.

    The draft model has its own KV memory, with the same block numbers as the large model's cache. The KV of a sequence
    is computed when the sequence first gets a draft. Sequences that share a block write the same values into it.
    Nothing special is therefore needed when blocks are shared, moved or evicted.
    """

    def __init__(
        self,
        load: Callable[[], PagedDecoder],
        *,
        max_len: int,
        max_running: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        row_cost: float,
    ) -> None:
        self._load, self._num_blocks, self._block_size = load, num_blocks, block_size
        self._model: PagedDecoder | None = None
        self._cache: list[torch.Tensor] = []
        self._batch = InputBatch(max_running, max_len, block_size, device)
        self._cost = StepCost(row_cost)
        self._known: dict[str, int] = {}  # tokens with KV here, by sequence
        self._drafted: dict[str, tuple[int, list[int]]] = {}  # the last draft, and the tokens before it

    def allocate(self) -> None:
        """Loads the weights if they are not loaded, and allocates the KV memory."""
        self._model = self._model or self._load()
        self._cache = self._model.new_cache(self._num_blocks, self._block_size)

    def free(self, weights: bool) -> None:
        """Frees the KV memory. If `weights` is True, frees the weights as well."""
        self._cache = []
        self._known.clear()
        self._drafted.clear()
        if weights:
            self._model = None

    def release(self, seq: Sequence) -> None:
        """Forgets a sequence that has lost its blocks."""
        self._batch.release(seq)
        self._known.pop(seq.seq_id, None)
        self._drafted.pop(seq.seq_id, None)

    def seconds(self, rows: int) -> float:
        """Returns the estimated seconds to guess one token for each of `rows` sequences."""
        return self._cost.seconds(rows)

    def num_missing(self, seq: Sequence) -> int:
        """Returns how many of a sequence's tokens have no KV in this model."""
        return len(seq.tokens) - self._known.get(seq.seq_id, 0)

    def draft(self, seqs: Items[Sequence], counts: Items[int]) -> list[list[int]]:
        """Returns a draft for each sequence. `counts` has the number of tokens to guess for each sequence. Blocks for
        these tokens must already be allocated.

        First computes KV that the sequences lack. Each call computes a limited number of such tokens. If a
        sequence's KV is still incomplete after that, its draft is empty.
        """
        drafts: dict[str, list[int]] = {seq.seq_id: [] for seq in seqs}
        left, going, chunks = _CATCH_UP_TOKENS, list[tuple[Sequence, int]](), list[ScheduledChunk]()
        for seq, count in zip(seqs, counts, strict=True):
            start = self._known[seq.seq_id] = self._keep_right(seq)
            length = min(len(seq.tokens) - start, left)
            if length > 0 and count > 0:
                left -= length
                chunks.append(ScheduledChunk(seq, start, length))
                self._known[seq.seq_id] = start + length
                going += [(seq, count)] * chunks[-1].yields_token
        while chunks:
            began = time.perf_counter()
            tokens = self._next_tokens(chunks)
            if all(chunk.length == 1 for chunk in chunks):
                self._cost.observe(len(chunks), time.perf_counter() - began)
            for (seq, _), token in zip(going, tokens, strict=True):
                drafts[seq.seq_id].append(token)
            going = [(seq, count) for seq, count in going if len(drafts[seq.seq_id]) < count]
            chunks = []
            for seq, _ in going:
                draft = drafts[seq.seq_id]
                chunks.append(ScheduledChunk(seq, len(seq.tokens) + len(draft) - 1, 1, list(draft)))
                self._known[seq.seq_id] = len(seq.tokens) + len(draft)
        for seq in seqs:
            self._drafted[seq.seq_id] = len(seq.tokens), drafts[seq.seq_id]
        return [drafts[seq.seq_id] for seq in seqs]

    def _keep_right(self, seq: Sequence) -> int:
        """Returns how many of a sequence's first tokens have valid KV: the KV of wrong guesses is computed again."""
        known = self._known.get(seq.seq_id, 0)
        length, draft = self._drafted.pop(seq.seq_id, (known, []))
        right = length
        for guess, token in zip(draft, seq.tokens[length:], strict=False):
            if guess != token:
                break
            right += 1
        return min(known, right, len(seq.tokens) - 1)

    def _next_tokens(self, chunks: list[ScheduledChunk]) -> list[int]:
        assert self._model is not None
        logits_RV = self._model.forward(self._batch.build(chunks), self._cache)
        tokens: list[int] = logits_RV.argmax(-1).tolist()
        return tokens


def check_same_vocabulary(arch: Architecture, model_dir: Path, draft: Architecture, draft_dir: Path) -> None:
    """Raises ConfigError if the two models' files show that token ids mean different things to them."""
    same = arch.vocab_size == draft.vocab_size
    files = [each / "tokenizer.json" for each in (model_dir, draft_dir)]
    if same and all(file.exists() for file in files):
        vocabularies = [read_json(file).get("model") for file in files]
        same = vocabularies[0] == vocabularies[1]
    if not same:
        raise ConfigError(
            f"draft_model {draft_dir} has another vocabulary than {model_dir}.",
            hint="Take a smaller model of the same family, or leave draft_model out.",
        )
