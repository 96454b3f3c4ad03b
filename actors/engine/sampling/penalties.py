"""Penalties on tokens that have occurred: OpenAI's presence and frequency (over the output) and CTRL's repetition (over
prompt and output, arXiv 1909.05858).

Only the logits of tokens that occurred are touched, so the cost follows the text and not the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch

from raytide.actors.engine.sequence import Sequence


class Occurrences:
    """The distinct tokens of one sequence and their counts in its output, updated incrementally."""

    def __init__(self, seq: Sequence) -> None:
        # Tokens of the prompt count for the repetition penalty alone.
        prompt = seq.tokens[: seq.prompt_len] if seq.params.repetition_penalty != 1.0 else []
        distinct = np.unique(np.array(prompt, np.int64))
        self._place = {token: place for place, token in enumerate(distinct.tolist())}
        self._ids = distinct
        self._outputs = np.zeros(len(distinct), np.float32)
        self._known = seq.prompt_len

    def update(self, seq: Sequence) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Returns the tokens and their counts as of now."""
        for token in seq.tokens[self._known :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place + 16)
                self._outputs = np.pad(self._outputs, (0, place + 16))
            self._ids[place] = token
            self._outputs[place] += 1.0
        self._known = len(seq.tokens)
        size = len(self._place)
        return self._ids[:size], self._outputs[:size]


def penalize(logits_RV: torch.Tensor, rows: Items[int], seqs: Items[Sequence], seen: Items[Occurrences]) -> None:
    """Applies each row's penalties in place."""
    ids, outputs = zip(*(each.update(seq) for each, seq in zip(seen, seqs, strict=True)), strict=True)
    sizes = [len(each) for each in ids]

    def per_token(values: Items[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits_RV.device)

    row_N = torch.from_numpy(np.repeat(np.array(rows), sizes)).to(logits_RV.device)
    token_N = torch.from_numpy(np.concatenate(ids)).to(logits_RV.device)
    output_N = torch.from_numpy(np.concatenate(outputs)).to(logits_RV.device)
    repetition_N = per_token([seq.params.repetition_penalty for seq in seqs])
    value_N = logits_RV[row_N, token_N]
    value_N = torch.where(value_N > 0, value_N / repetition_N, value_N * repetition_N)
    value_N -= output_N * per_token([seq.params.frequency_penalty for seq in seqs])
    value_N -= (output_N > 0) * per_token([seq.params.presence_penalty for seq in seqs])
    logits_RV[row_N, token_N] = value_N
