"""Draws a random token for each row of logits, filtered by top-k, top-p and min-p.

One uniform number, hashed from (seed, position), selects the token through the inverse of the row's cumulative
distribution. There is no random state. A sequence that is computed again draws the same tokens, and a row's token does
not depend on the other rows.

Shape suffixes: R rows, V vocabulary, C candidates, B blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from raytide.actors.engine.sampling_params import SamplingParams

Tensor = torch.Tensor
Row = npt.NDArray[np.float32]

_BLOCK = 256
_CHUNK_ELEMENTS = 1 << 19
"""The most probabilities that a CPU filters and draws from at once, so that they stay in its cache and in reused
memory.
"""
_SAMPLE, _SPREAD = 1024, 48
_SORTED = 4096
"""The most probabilities that are sorted directly instead of sampled again."""


class RandomSampler:
    """Draws tokens for a fixed set of rows. It keeps their sampling parameters as tensors."""

    def __init__(self, params: Items[SamplingParams], seeds: Items[int], device: torch.device) -> None:
        self._seeds = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], np.uint64)
        self._device = device
        temperatures = [max(each.temperature, 1e-5) for each in params]
        self._temperature_R1 = None
        if set(temperatures) != {1.0}:
            self._temperature_R1 = torch.tensor(temperatures, device=device)[:, None]
        self._params = list(params)

    def draw(self, logits_RV: Tensor, positions: Items[int], rows: Items[int] | None = None) -> Tensor:
        """Returns one token for each row of logits, or for each of `rows` if they are given. `positions` are the
        present lengths of the rows' sequences.
        """
        points_R1 = torch.from_numpy(uniforms(self._seeds, positions)).to(self._device)[:, None]
        size = len(self._params)
        if self._device.type == "cpu":
            size = max(1, _CHUNK_ELEMENTS // logits_RV.shape[1])
        tokens = []
        for start in range(0, len(self._params), size):
            chunk = slice(start, start + size)
            part_RV = logits_RV[chunk if rows is None else rows[chunk]]
            if self._temperature_R1 is not None:
                part_RV = part_RV / self._temperature_R1[chunk]
            probs_RV = keep_likely(part_RV.softmax(-1), self._params[chunk])
            tokens.append(_invert(probs_RV, points_R1[chunk]))
        return torch.cat(tokens)


def _invert(probs_RV: Tensor, point_R1: Tensor) -> Tensor:
    """Returns the first token of each row at which the cumulative probability exceeds `point` times the row's total.

    It first searches blocks of tokens: a running sum in 64 bits over the whole vocabulary takes ten times as long.
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
    """Returns for each row the index at which the running sum first exceeds the point, and the sum before this index.
    If rounding puts a point past the end, the index is that of the last nonzero term.
    """
    end_R1 = upto_RC[:, -1:]
    point_R1 = torch.minimum(point_R1, torch.nextafter(end_R1, torch.zeros_like(end_R1)))
    at_R1 = torch.searchsorted(upto_RC, point_R1, right=True).clamp_max(upto_RC.shape[1] - 1)
    before_R1 = torch.where(at_R1 > 0, upto_RC.gather(1, (at_R1 - 1).clamp_min(0)), 0.0)
    return at_R1, before_R1


def keep_likely(probs_RV: Tensor, params: Items[SamplingParams]) -> Tensor:
    """Sets to zero, in place, the probabilities that top_k, top_p or min_p exclude, and returns the tensor. top_k
    applies before the other two.

    A token that is as likely as the least likely kept token is kept as well.
    """
    filtered = [row for row, each in enumerate(params) if each.has_filters]
    if not filtered:
        return probs_RV
    if probs_RV.device.type == "cpu":
        for row in filtered:
            probs_V = probs_RV[row].numpy()
            probs_V *= probs_V >= _floor(probs_V, params[row])
        return probs_RV
    min_p_R = torch.tensor([each.min_p for each in params], device=probs_RV.device)
    floor_R = torch.maximum(min_p_R * probs_RV.amax(-1), rank_floor(probs_RV, params))
    return probs_RV.masked_fill_(probs_RV < floor_R[:, None], 0.0)


def rank_floor(probs_RV: Tensor, params: Items[SamplingParams]) -> Tensor:
    """Returns, for each row, the smallest probability that top_k and top_p keep. top_p applies to the result of top_k.
    The row is sorted for this.
    """
    device, vocab = probs_RV.device, probs_RV.shape[-1]
    top_k_R1 = torch.tensor([min(each.top_k or vocab, vocab) for each in params], device=device)[:, None]
    top_p_R1 = torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device)[:, None]
    best_RV = probs_RV.sort(-1, descending=True).values * (torch.arange(vocab, device=device) < top_k_R1)
    mass_RV = best_RV.cumsum(-1, dtype=torch.float64)
    total_R1 = torch.where(top_k_R1 < vocab, mass_RV[:, -1:], 1.0)
    kept_R1 = torch.where(top_p_R1 < 1.0, torch.searchsorted(mass_RV, top_p_R1 * total_R1) + 1, vocab)
    return best_RV.gather(-1, torch.minimum(kept_R1, top_k_R1) - 1).squeeze(1)


def _floor(probs_V: Row, params: SamplingParams) -> np.float32:
    """Returns the smallest probability that the filters keep in one row, on a CPU, without sorting the row."""
    if np.isnan(probs_V[0]):  # a grammar that failed allows no token, which the draw reports
        return np.float32(0.0)
    vocab, best, mass = len(probs_V), probs_V, params.top_p
    floor = np.float32(params.min_p) * probs_V.max()
    if 0 < params.top_k < vocab:
        best = np.partition(probs_V, vocab - params.top_k)[vocab - params.top_k :]
        mass *= best.sum(dtype=np.float64)
    if params.top_p < 1.0:
        return max(floor, _nucleus_floor(best, mass))
    return max(floor, best.min()) if params.top_k else floor


def _nucleus_floor(probs: Row, mass: float) -> np.float32:
    """Returns the largest probability p such that the probabilities of at least p sum to at least `mass`.

    A quickselect by sums: two values from a sorted sample, which should lie above and below p, divide the probabilities
    into three parts; the search continues in the part that contains p.
    """
    above = 0.0  # the sum of what is known to be kept
    size = len(probs) + 1
    while _SORTED < len(probs) < size:  # equal ones cannot be parted
        size = len(probs)
        sample = np.sort(probs[:: size // _SAMPLE])[::-1]
        sums = np.cumsum(sample, dtype=np.float64)
        place = int(np.searchsorted(sums, sums[-1] * (mass - above) / probs.sum(dtype=np.float64)))
        is_high = probs > sample[max(place - _SPREAD, 0)]
        with_high = above + float((probs * is_high).sum(dtype=np.float64))
        if with_high >= mass:
            probs = probs.compress(is_high)
            continue
        is_low = probs <= sample[min(place + _SPREAD, len(sample) - 1)]
        middle = probs.compress(~(is_high | is_low))
        with_middle = with_high + float(middle.sum(dtype=np.float64))
        above, probs = (with_high, middle) if with_middle >= mass else (with_middle, probs.compress(is_low))
    best = np.sort(probs)[::-1]
    at = int(np.searchsorted(above + np.cumsum(best, dtype=np.float64), mass))
    return np.float32(best[min(at, len(best) - 1)])


def uniforms(seeds: npt.NDArray[np.uint64], positions: Items[int]) -> npt.NDArray[np.float64]:
    """Returns a uniform number in [0, 1) for each (seed, position), by two rounds of splitmix64's finalizer."""
    mixed = _mix(_mix(seeds) ^ np.array(positions, np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
