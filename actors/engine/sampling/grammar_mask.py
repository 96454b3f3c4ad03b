"""Masks the logits of tokens that the grammar of a row's sequence does not allow. A grammar that fails ends only its
own request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items

import numpy as np
import torch

from raytide.actors.engine.limits import MAX_MASK_MS
from raytide.actors.engine.sequence import Sampled, Sequence
from raytide.actors.engine.text.structured_output import GrammarState
from raytide.core.errors import RaytideError, UsageError

_STRIKES = 2


class GrammarMask:
    """The state of the grammar of each running sequence."""

    def __init__(self) -> None:
        self._states: dict[str, GrammarState] = {}
        self._strikes: dict[str, int] = {}  # steps in a row in which the request's grammars took too long
        self._clock = time.thread_time  # CPU time: a busy machine is not the grammar's fault

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq.seq_id, None)
        self._strikes.pop(seq.seq_id, None)

    def mask(self, logits_RV: torch.Tensor, seqs: Items[tuple[int, Sequence]]) -> dict[int, RaytideError]:
        """Masks the rows of these sequences by their grammars. Returns the errors of failed grammars by row."""
        if not seqs:
            return {}
        grammars = [seq.grammar for _, seq in seqs if seq.grammar is not None]
        mask_RW = np.zeros((len(seqs), max(grammar.mask_words for grammar in grammars)), np.int32)
        errors: dict[int, RaytideError] = {}
        spent_ms: dict[str, float] = {}
        for place, (row, seq) in enumerate(seqs):
            try:
                state = self._state(seq)
                state.follow(seq.tokens, seq.prompt_len)  # of a resumed request all tokens: not the grammar's fault
            except BaseException as error:
                errors[row] = _own(error)
                continue
            began_s = self._clock()
            try:
                if spent_ms.get(seq.request_id, 0.0) > MAX_MASK_MS:  # the whole batch waits for this
                    raise UsageError(
                        f"the grammar took over {MAX_MASK_MS:g} ms for one token of each sample.",
                        hint="Make it simpler, or ask for fewer samples.",
                    )
                state.fill(mask_RW[place])
            except BaseException as error:
                errors[row] = _own(error)
            spent_ms[seq.request_id] = spent_ms.get(seq.request_id, 0.0) + (self._clock() - began_s) * 1e3
        slow = {request_id for request_id, ms in spent_ms.items() if ms > MAX_MASK_MS}
        for row, seq in seqs:
            self._strikes[seq.seq_id] = self._strikes.get(seq.seq_id, 0) + 1 if seq.request_id in slow else 0
            if self._strikes[seq.seq_id] >= _STRIKES and row not in errors:
                errors[row] = UsageError(
                    f"the grammar took over {MAX_MASK_MS:g} ms for each of {_STRIKES} tokens.", hint="Make it simpler."
                )
        apply_mask(logits_RV, [row for row, _ in seqs], mask_RW)
        return errors

    def allowed(self, seq: Sequence, draft: list[int]) -> int:
        """Returns the length of the longest prefix of the draft that obeys the sequence's grammar, in tokens.

        Returns 0 if the grammar fails. The error is then reported when the sequence's next token is drawn.
        """
        try:
            state = self._state(seq)
            state.follow(seq.tokens, seq.prompt_len)
            return state.allowed(draft)
        except BaseException as error:
            _own(error)
            return 0

    def advance(self, chosen: Items[tuple[Sequence, Sampled]]) -> None:
        """Advances each sequence's grammar by its sampled token, and marks outputs that are complete."""
        for seq, sampled in chosen:
            if sampled.token < 0:
                continue
            try:
                state = self._state(seq)
                state.follow(seq.tokens, seq.prompt_len)
                state.consume([sampled.token])
                sampled.ends = state.is_complete
            except BaseException as error:
                sampled.token, sampled.error = -1, _own(error)

    def _state(self, seq: Sequence) -> GrammarState:
        state = self._states.get(seq.seq_id)
        if state is None:
            assert seq.grammar is not None
            state = self._states[seq.seq_id] = seq.grammar.state()
        return state


def apply_mask(
    logits_RV: torch.Tensor, rows: Items[int], mask_RW: np.ndarray[tuple[int, int], np.dtype[np.int32]]
) -> None:
    """Forbids tokens in the given rows: sets the logits to minus infinity where a token's bit in the row's mask is 0.
    The bits are packed into words, the lowest bit first.
    """
    vocab = logits_RV.shape[1]
    bytes_RB = torch.from_numpy(mask_RW.view(np.uint8)).to(logits_RV.device)
    table = _EIGHT_BITS.to(logits_RV.device)
    allowed_RV = table[bytes_RB.long()].flatten(1)[:, :vocab]
    if len(rows) == len(logits_RV):
        logits_RV.masked_fill_(~allowed_RV, -torch.inf)
    else:
        logits_RV[rows] = logits_RV[rows].masked_fill_(~allowed_RV, -torch.inf)


_EIGHT_BITS = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")).bool()


def _own(error: BaseException) -> RaytideError:
    """Returns the error with which the request ends. Panics in Rust are BaseExceptions, not Exceptions."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return (
        error
        if isinstance(error, RaytideError)
        else UsageError(f"the grammar failed: {error!r}.", hint="Make it simpler.")
    )
