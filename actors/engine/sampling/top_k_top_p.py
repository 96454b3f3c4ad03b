"""One random token for each row of logits, filtered by top-k, top-p and min-p.

A token takes one uniform number, hashed from (seed, position), through the inverse of the row's cumulative
distribution: no random state lives anywhere, a sequence that is computed again draws the same again, and a row's token
does not depend on the other rows. Shape suffixes: R rows, V vocabulary, C candidates, B blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from raytide.actors.engine.sampling_params import SamplingParams

__all__ = ["RandomSampler", "keep_likely", "uniforms"]

Tensor = torch.Tensor

_FIRST_CANDIDATES = 64
_BLOCK = 256
_SORTED_AT_ONCE = {"cpu": 1}
"""Rows, by the kind of device: on a CPU a row that stays in its cache takes a tenth of the time of one among many."""


class RandomSampler:
    """The parameters of some rows, as columns."""

    def __init__(self, params: Items[SamplingParams], seeds: Items[int], device: torch.device) -> None:
        self._seeds = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], np.uint64)
        self._device = device
        temperatures = [max(each.temperature, 1e-5) for each in params]
        self._temperature_R1 = None if set(temperatures) == {1.0} else self._column(temperatures)
        self._filtered = [row for row, each in enumerate(params) if each.has_filters]
        self._filters = [params[row] for row in self._filtered]

    def draw(self, logits_RV: Tensor, positions: Items[int]) -> Tensor:
        """A token for each row; `positions` are the lengths of the sequences so far. The logits are its to change."""
        if self._temperature_R1 is not None:
            logits_RV = logits_RV.div_(self._temperature_R1)
        probs_RV = logits_RV.softmax(-1)
        if len(self._filtered) == len(probs_RV):
            probs_RV = keep_likely(probs_RV, self._filters)
        elif self._filtered:
            probs_RV[self._filtered] = keep_likely(probs_RV[self._filtered], self._filters)
        points = torch.from_numpy(uniforms(self._seeds, positions)).to(self._device)
        return _invert(probs_RV, points[:, None])

    def _column(self, values: Items[float]) -> Tensor:
        return torch.tensor(values, device=self._device)[:, None]


def _invert(probs_RV: Tensor, point_R1: Tensor) -> Tensor:
    """The first token of each row at which the cumulative probability is above the point's share of the whole.

    Block by block first: a running sum of the whole vocabulary in 64 bits takes ten times as long.
    """
    rows, vocab = probs_RV.shape
    padded_RBW = F.pad(probs_RV, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    upto_RB = padded_RBW.sum(-1).cumsum(-1, dtype=torch.float64)
    block_R1, before_R1 = _first_above(upto_RB, point_R1 * upto_RB[:, -1:])
    inside_RW = padded_RBW[torch.arange(rows, device=probs_RV.device), block_R1.squeeze(1)]
    rest_R1 = point_R1 * upto_RB[:, -1:] - before_R1
    place_R1, _ = _first_above(inside_RW.cumsum(-1, dtype=torch.float64), rest_R1)
    return (block_R1 * _BLOCK + place_R1).squeeze(1)


def _first_above(upto_RC: Tensor, point_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Where each running sum first exceeds the point, and the sum before that. Rounding may put the point past the end;
    it still finds the last step, never one of zero height.
    """
    end_R1 = upto_RC[:, -1:]
    point_R1 = torch.minimum(point_R1, torch.nextafter(end_R1, torch.zeros_like(end_R1)))
    at_R1 = torch.searchsorted(upto_RC, point_R1, right=True).clamp_max(upto_RC.shape[1] - 1)
    before_R1 = torch.where(at_R1 > 0, upto_RC.gather(1, (at_R1 - 1).clamp_min(0)), 0.0)
    return at_R1, before_R1


def keep_likely(probs_RV: Tensor, params: Items[SamplingParams]) -> Tensor:
    """Zero, in place, what top_k, then top_p, and min_p exclude. Ties with the least token kept are kept too."""
    min_p = torch.tensor([each.min_p for each in params], device=probs_RV.device)
    floor_R = min_p * probs_RV.amax(-1)
    ranked = [row for row, each in enumerate(params) if each.top_k or each.top_p < 1.0]
    if len(ranked) == len(params):
        floor_R = torch.maximum(floor_R, _rank_floor(probs_RV, params))
    elif ranked:
        floors = _rank_floor(probs_RV[ranked], [params[row] for row in ranked])
        floor_R[ranked] = torch.maximum(floor_R[ranked], floors)
    return probs_RV.masked_fill_(probs_RV < floor_R[:, None], 0.0)


def _rank_floor(probs_RV: Tensor, params: Items[SamplingParams]) -> Tensor:
    """The least probability that top_k and then top_p (of what top_k left) keep.

    Sorting the vocabulary is dear, so the largest few are tried first, and the rows that need more are sorted whole;
    which way a row went does not change its answer.
    """
    device, vocab = probs_RV.device, probs_RV.shape[-1]
    top_k_R1 = torch.tensor([min(each.top_k or vocab, vocab) for each in params], device=device)[:, None]
    top_p_R1 = torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device)[:, None]
    best_RC = probs_RV.topk(min(_FIRST_CANDIDATES, vocab)).values
    cuts = any(each.top_k for each in params)
    floor_R, is_found_R = _floor_among(best_RC, top_k_R1, top_p_R1, vocab, cuts)
    if not bool(is_found_R.all()):
        for rest in (~is_found_R).nonzero().squeeze(1).split(_SORTED_AT_ONCE.get(device.type, len(probs_RV))):
            floor_R[rest], _ = _floor_among(_descending(probs_RV[rest]), top_k_R1[rest], top_p_R1[rest], vocab, cuts)
    return floor_R


def _floor_among(best_RC: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, vocab: int, cuts: bool) -> tuple[Tensor, Tensor]:
    """The floor of each row by its largest probabilities in order, and whether they were enough to tell. `cuts` is
    False when no row has a top_k.
    """
    count = best_RC.shape[1]
    if cuts:
        best_RC = best_RC * (torch.arange(count, device=best_RC.device) < top_k_R1)
    mass_RC = best_RC.cumsum(-1, dtype=torch.float64)
    total_R1 = torch.where(top_k_R1 < vocab, mass_RC[:, -1:], 1.0)
    kept_R1 = torch.where(top_p_R1 < 1.0, torch.searchsorted(mass_RC, top_p_R1 * total_R1) + 1, vocab)
    # With fewer than top_k in hand the total is not known.
    is_enough_R1 = (top_k_R1 <= count) | ((top_k_R1 == vocab) & (kept_R1 <= count))
    kept_R1 = torch.minimum(kept_R1, top_k_R1).clamp_max(count)
    return best_RC.gather(-1, kept_R1 - 1).squeeze(1), (is_enough_R1 | (count == vocab)).squeeze(1)


def _descending(probs_RV: Tensor) -> Tensor:
    if probs_RV.device.type == "cpu":  # numpy's takes a fifth of the time of torch's
        return torch.from_numpy(np.sort(probs_RV.numpy(), axis=-1)).flip(-1)
    return probs_RV.sort(-1, descending=True).values


def uniforms(seeds: npt.NDArray[np.uint64], positions: Items[int]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) that (seed, position) determines: two rounds of splitmix64's finalizer."""
    mixed = _mix(_mix(seeds) ^ np.array(positions, np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
