"""From logits to tokens. Each row's token depends on its logits, parameters, seed and position alone, never on the
batch.

A random token takes one uniform number, hashed from (seed, position), through the inverse of the row's cumulative
distribution; so no random state lives anywhere, and a sequence that is computed again draws the same again.
"""

from __future__ import annotations

import torch

from raytide.actors.engine.logprobs import token_logprobs
from raytide.actors.engine.sequence import Sampled, Sequence

__all__ = ["Sampler", "uniform"]

Tensor = torch.Tensor

_MASK = (1 << 64) - 1
_FIRST_CANDIDATES = 64


class Sampler:
    """Keeps, for sequences with penalties only, how often each token has occurred."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[str, _Counts] = {}

    def forget(self, seq: Sequence) -> None:
        self._counts.pop(seq.seq_id, None)

    @torch.inference_mode()
    def sample(self, logits_RV: Tensor, seqs: list[Sequence]) -> list[Sampled]:
        """The next token of each row; -1 for a row without a finite maximum, which means the model broke on it.

        The logits are the sampler's to change.
        """
        asked = [row for row, seq in enumerate(seqs) if seq.params.needs_logprobs]
        untouched_RV = logits_RV[asked] if asked else logits_RV
        broken = ~torch.isfinite(logits_RV.amax(-1))
        for row, seq in enumerate(seqs):
            if seq.params.has_penalties:
                self._penalize(logits_RV[row], seq)
        drawn = [row for row, seq in enumerate(seqs) if not seq.params.is_greedy]
        if len(drawn) == len(seqs):
            tokens = _draw(logits_RV, seqs)
        else:
            tokens = _argmax(logits_RV)
            if drawn:
                tokens[drawn] = _draw(logits_RV[drawn], [seqs[row] for row in drawn])
        tokens[broken] = -1
        sampled = [Sampled(token) for token in tokens.tolist()]
        asked_tokens = [max(0, sampled[row].token) for row in asked]
        counts = [seqs[row].params.logprobs or 0 for row in asked]
        for row, logprobs in zip(asked, token_logprobs(untouched_RV, asked_tokens, counts), strict=True):
            sampled[row].logprobs = logprobs
        return sampled

    def _penalize(self, logits_V: Tensor, seq: Sequence) -> None:
        counts = self._counts.get(seq.seq_id)
        if counts is None:
            counts = self._counts[seq.seq_id] = _Counts(self._vocab_size, logits_V.device)
        counts.update(seq)
        params = seq.params
        if params.repetition_penalty != 1.0:
            factor = torch.where(logits_V > 0, 1.0 / params.repetition_penalty, params.repetition_penalty)
            logits_V.mul_(torch.where(counts.seen_V, factor, 1.0))
        logits_V.sub_(counts.output_V * params.frequency_penalty)
        logits_V.sub_((counts.output_V > 0) * params.presence_penalty)


class _Counts:
    """Which tokens a sequence has seen, and how often each is in its output; extended by what is new since the last
    step.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.output_V = torch.zeros(vocab_size, device=device)
        self._known = 0

    def update(self, seq: Sequence) -> None:
        new = torch.tensor(seq.tokens[self._known :], device=self.seen_V.device)
        self.seen_V[new] = True
        output = new[max(0, seq.prompt_len - self._known) :]
        self.output_V.index_add_(0, output, torch.ones(len(output), device=new.device))
        self._known = len(seq.tokens)


def _argmax(logits_RV: Tensor) -> Tensor:
    if logits_RV.device.type == "cpu":  # torch's own takes ten times as long there
        return torch.from_numpy(logits_RV.numpy().argmax(-1))
    return logits_RV.argmax(-1)


def _draw(logits_RV: Tensor, seqs: list[Sequence]) -> Tensor:
    """One random token per row."""
    device = logits_RV.device
    temperatures = torch.tensor([max(seq.params.temperature, 1e-5) for seq in seqs], device=device)
    probs_RV = (logits_RV / temperatures[:, None]).softmax(-1)
    filtered = [row for row, seq in enumerate(seqs) if seq.params.has_filters]
    if filtered:
        probs_RV[filtered] = _filter(probs_RV[filtered], [seqs[row] for row in filtered])
    cumulative_RV = probs_RV.cumsum(-1, dtype=torch.float64)
    points = torch.tensor([uniform(seq.seed, len(seq.tokens)) for seq in seqs], dtype=torch.float64, device=device)
    points = points * cumulative_RV[:, -1]
    return torch.searchsorted(cumulative_RV, points[:, None], right=True).squeeze(1)  # right: steps over probability 0


def _filter(probs_RV: Tensor, seqs: list[Sequence]) -> Tensor:
    """Zero what top_k, then top_p, and min_p exclude. Ties with the least token that is kept are kept too."""
    min_p = torch.tensor([seq.params.min_p for seq in seqs], device=probs_RV.device)
    floor_R = min_p * probs_RV.amax(-1)
    ranked = [row for row, seq in enumerate(seqs) if seq.params.top_k or seq.params.top_p < 1.0]
    if ranked:
        floor_R[ranked] = torch.maximum(floor_R[ranked], _rank_floor(probs_RV[ranked], [seqs[row] for row in ranked]))
    return probs_RV.masked_fill(probs_RV < floor_R[:, None], 0.0)


def _rank_floor(probs_RV: Tensor, seqs: list[Sequence]) -> Tensor:
    """The least probability that top_k and then top_p (of what top_k left) keep.

    Sorting the vocabulary is dear, so the largest few are tried first; how many were tried does not change the answer.
    """
    device, vocab = probs_RV.device, probs_RV.shape[-1]
    limits = [min(seq.params.top_k or vocab, vocab) for seq in seqs]
    top_k = torch.tensor(limits, device=device)[:, None]
    top_p = torch.tensor([seq.params.top_p for seq in seqs], dtype=torch.float64, device=device)[:, None]
    candidates = min(vocab, max([_FIRST_CANDIDATES, *(limit for limit in limits if limit < vocab)]))
    while True:
        best_RC = probs_RV.topk(candidates).values
        mass_RC = torch.where(torch.arange(candidates, device=device) < top_k, best_RC, 0.0).cumsum(
            -1, dtype=torch.float64
        )
        total_R1 = torch.where(top_k < vocab, mass_RC[:, -1:], 1.0)
        kept = torch.where(top_p < 1.0, (mass_RC < top_p * total_R1).sum(-1, keepdim=True) + 1, vocab)
        kept = torch.minimum(kept, top_k)
        if candidates == vocab or bool((kept <= candidates).all()):
            return best_RC.gather(-1, kept.clamp_max(candidates) - 1).squeeze(1)
        candidates = min(candidates * 8, vocab)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that (seed, position) determines: two rounds of splitmix64's finalizer."""
    return (_mix(_mix(seed & _MASK) ^ position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
