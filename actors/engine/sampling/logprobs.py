"""Log probabilities of chosen tokens and of a prompt's tokens, from the model's unmodified logits.

A row's result does not depend on the other rows. Shape suffixes: R rows, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from raytide.actors.engine.limits import MAX_LOGPROBS
from raytide.actors.engine.sequence import ScheduledChunk, Sequence
from raytide.actors.engine.types import TokenLogprobs

_BLOCK = 128
_ROWS_AT_ONCE = 8  # keeps intermediate results small: fresh memory takes longer than the computation


def token_logprobs(
    logits_RV: torch.Tensor, rows: Items[int], tokens: Items[int], counts: Items[int]
) -> list[TokenLogprobs]:
    """Returns, for each of `rows`, the log probability and rank of a given token, and the most likely tokens. `tokens`
    has the given token of each row. `counts` has the number of most likely tokens of each row.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        chunk = slice(start, start + _ROWS_AT_ONCE)
        found += _of_rows(logits_RV[rows[chunk]], tokens[chunk], counts[chunk])
    return found


def _of_rows(logits_RV: torch.Tensor, tokens: Items[int], counts: Items[int]) -> list[TokenLogprobs]:
    logprobs_RV = logits_RV.log_softmax(-1)
    chosen_R1 = torch.tensor(tokens, device=logits_RV.device)[:, None]
    logprobs_R1 = logprobs_RV.gather(-1, chosen_R1)
    ranks = _counts(logprobs_RV > logprobs_R1)
    # Always the same number, so that the order of equals does not depend on the other rows.
    values, ids = _most_likely(logprobs_RV) if any(counts) else ([[]] * len(tokens), [[]] * len(tokens))
    return [
        TokenLogprobs(token, logprob, 1 + rank, tuple(zip(ids[row][:count], values[row][:count], strict=True)))
        for row, (token, logprob, rank, count) in enumerate(
            zip(tokens, logprobs_R1.squeeze(1).tolist(), ranks, counts, strict=True)
        )
    ]


def _most_likely(logprobs_RV: torch.Tensor) -> tuple[list[list[float]], list[list[int]]]:
    """Returns the MAX_LOGPROBS largest values of each row, and their tokens.

    It searches only the MAX_LOGPROBS blocks of the row that have the largest maxima, which contain all of these values:
    torch would sort a copy of the whole row.
    """
    rows, vocab = logprobs_RV.shape
    count, full = min(MAX_LOGPROBS, vocab), vocab // _BLOCK
    blocked_RBW = logprobs_RV[:, : full * _BLOCK].unflatten(1, (full, _BLOCK))
    blocks_RK1 = blocked_RBW.amax(-1).topk(min(count, full)).indices[:, :, None]
    tokens = torch.arange(vocab, device=logprobs_RV.device)
    tokens_RC = torch.cat(
        (
            (blocks_RK1 * _BLOCK + tokens[:_BLOCK]).flatten(1),
            tokens[full * _BLOCK :].expand(rows, -1),
        ),
        1,
    )
    best_RK = logprobs_RV.gather(1, tokens_RC).topk(count)
    return best_RK.values.tolist(), tokens_RC.gather(1, best_RK.indices).tolist()


def _counts(true_RV: torch.Tensor) -> list[int]:
    """Returns the number of true values in each row."""
    if true_RV.device.type == "cpu":  # numpy's takes a tenth of the time of torch's
        return [int(np.count_nonzero(row)) for row in true_RV.numpy()]
    counts: list[int] = true_RV.sum(-1).tolist()
    return counts


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a step's flat batch that belong to prompt tokens with requested log probabilities. The log
    probabilities are computed from these rows.
    """

    chunks: list[tuple[ScheduledChunk, int]]  # with the number of its first positions that count
    rows: list[int]

    @classmethod
    def of(cls, chunks: Items[ScheduledChunk]) -> PromptRows:
        wanted, rows, offset = list[tuple[ScheduledChunk, int]](), list[int](), 0
        for chunk in chunks:
            if (count := _prompt_positions(chunk)) > 0:
                wanted.append((chunk, count))
                rows += range(offset, offset + count)
            offset += chunk.length
        return cls(wanted, rows)

    def record(self, logits_RV: torch.Tensor) -> None:
        """Records each row's log probabilities in the row's sequence. Recording the same rows a second time changes
        nothing.
        """
        at = 0
        for chunk, count in self.chunks:
            seq, start = chunk.seq, chunk.start
            assert len(seq.prompt_logprobs) > start or start == 0, "a prompt position was not computed"
            seq.prompt_logprobs[0:1] = [None]
            seq.prompt_logprobs[start + 1 :] = token_logprobs(
                logits_RV,
                range(at, at + count),
                seq.tokens[start + 1 : start + 1 + count],
                [seq.params.prompt_logprobs or 0] * count,
            )
            at += count


def _prompt_positions(chunk: ScheduledChunk) -> int:
    seq: Sequence = chunk.seq
    if seq.params.prompt_logprobs is None or len(seq.prompt_logprobs) >= seq.prompt_len:
        return 0
    return min(chunk.start + chunk.length, seq.prompt_len - 1) - chunk.start
