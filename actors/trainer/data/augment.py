"""Changes samples as they are read. A change depends only on (seed, step, sample id), and not on ranks, resizes or
resumes.

Random numbers are counters hashed by splitmix64, because the random streams of libraries change between releases.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from raytide.actors.trainer.data.order.shuffle import Ids, mix
from raytide.actors.trainer.data.token_dataset import Rows
from raytide.core.specs.mixture import AugmentSpec, FillInTheMiddle, MaskedInputs

Floats = npt.NDArray[np.float64]
_SENTINELS = 3


class Augmentation:
    def __init__(self, spec: AugmentSpec, seed: int) -> None:
        self._spec, self._seed = spec, seed

    def __call__(self, rows: Rows, step: int, ids: Ids) -> tuple[Ids, Ids]:
        """Returns the inputs and targets of the rows after augmentation; lengths and documents stay as they are."""
        if self._spec.fill_in_the_middle is not None:
            tokens = rows.tokens.copy()
            for row, index in enumerate(ids.tolist()):
                _rearrange_row(tokens[row], rows, row, self._spec.fill_in_the_middle, self._key(step, index, "middle"))
            rows = rows._replace(tokens=tokens)
        inputs, targets = rows.examples()
        if self._spec.masked_inputs is not None:
            keys = [self._key(step, index, "masks") for index in ids.tolist()]
            inputs = _masked(inputs, rows, np.asarray(keys, np.uint64), self._spec.masked_inputs)
        return inputs, targets

    def _key(self, step: int, sample: int, purpose: str) -> int:
        text = f"{self._seed}/{step}/{sample}/{purpose}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform(keys: npt.NDArray[np.uint64], count: int) -> Floats:
    """Returns random numbers in [0, 1) with the shape [len(keys), count]. Each row depends only on its key."""
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    out: Floats = (mix(keys[:, None] + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return out


def fill_in_the_middle(document: Ids, spec: FillInTheMiddle, chances: Floats) -> Ids:
    """Returns the document rearranged for fill-in-the-middle training.

    The order is prefix, suffix, middle (PSM) or suffix, prefix, middle (SPM). SPM is the variant that starts with the
    sentinels of both prefix and suffix. The length stays the same, because the suffix loses as many tokens as there are
    sentinels: three.

    `document` has no end token. `chances` are four random numbers in [0, 1). The document is returned unchanged if
    the first of them is not below the spec's rate, or if its suffix is too short.
    """
    length = len(document)
    first, last = sorted(int(chance * (length + 1)) for chance in chances[1:3])
    if chances[0] >= spec.rate or length - last < _SENTINELS:
        return document
    prefix, middle, suffix = document[:first], document[first:last], document[last : length - _SENTINELS]
    before, between, behind = ([token] for token in (spec.prefix, spec.suffix, spec.middle))
    if chances[3] < spec.spm_rate:
        return np.concatenate((before, between, suffix, behind, prefix, middle))
    return np.concatenate((before, prefix, between, suffix, behind, middle))


def _rearrange_row(tokens: Ids, rows: Rows, row: int, spec: FillInTheMiddle, key: int) -> None:
    """Rearranges each document of a row in place. End tokens and padding stay where they are."""
    documents, learnt = rows.documents[row], rows.learnt[row]
    bounds = np.concatenate(([0], np.flatnonzero(np.diff(documents)) + 1, [len(documents)])).tolist()
    chances = uniform(np.asarray([key], np.uint64), 4 * (len(bounds) - 1))[0].reshape(-1, 4)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if learnt[begin:end].any():
            tokens[begin : end - 1] = fill_in_the_middle(tokens[begin : end - 1], spec, chances[number])


def _masked(inputs_BT: Ids, rows: Rows, keys_B: npt.NDArray[np.uint64], spec: MaskedInputs) -> Ids:
    """Returns the inputs with random spans replaced by `spec.token`. The last token of each document stays, since it
    may be the end token.
    """
    starts = uniform(keys_B, inputs_BT.shape[1]) < spec.start_rate
    hit = starts.copy()
    for back in range(1, min(spec.span, inputs_BT.shape[1])):
        hit[:, back:] |= starts[:, :-back]
    hit[:, :-1] &= rows.documents[:, 1:] == rows.documents[:, :-1]
    hit[:, -1] = False
    return np.where(hit, spec.token, inputs_BT)
