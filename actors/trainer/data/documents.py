"""The documents of a token dataset: where they end, and a hash of each one's tokens.

Both are kept in this user's cache folder under the manifest's hash, so a machine computes them once. Ends come from the
dataset's index; hashes need one pass over the tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raytide.actors.trainer.data.order.shuffle import Ids, mix
from raytide.core.io import token_dataset
from raytide.core.io.private_folder import lock, private_folder
from raytide.core.io.storage import full_disk_is_an_error
from raytide.core.io.token_dataset import TokenManifest

Hashes = npt.NDArray[np.uint64]
Array = npt.NDArray[Any]
CHUNK_TOKENS = 1 << 23
_POSITION = np.uint64(0x9E3779B97F4A7C15)
"""Multiplies a token's place in its document, so that a hash depends on the order."""


class DocumentSource(Protocol):
    """The tokens of a dataset, in shard order."""

    @property
    def digest(self) -> str: ...

    @property
    def location(self) -> str:
        """The path or URL of its folder."""
        ...

    @property
    def manifest(self) -> TokenManifest: ...

    @property
    def n_tokens(self) -> int: ...

    def read(self, start: int, out: Ids) -> None:
        """Fills `out` with the tokens from `start` on."""
        ...


def document_ends(data: DocumentSource) -> Ids:
    """Returns the end of each document; tokens behind the last end token are a document too."""

    def find() -> Ids:
        ends = token_dataset.document_ends(data.location, data.manifest)
        return ends if len(ends) and ends[-1] == data.n_tokens else np.append(ends, data.n_tokens)

    return _cached(f"{data.digest}-ends", find)


def document_hashes(data: DocumentSource, ends: Ids) -> Hashes:
    """Returns a 64-bit hash of each document's tokens; equal documents have equal ones, wherever they stand."""

    def find() -> Hashes:
        hashes = np.zeros(len(ends), np.uint64)
        for start, tokens in _chunks(data):
            stop = start + len(tokens)
            first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
            bounds = np.concatenate(([start], ends[first:last], [stop]))
            counts = np.diff(bounds)
            begins = np.concatenate(([0], ends))[first : last + 1]
            place = np.arange(start, stop) - np.repeat(begins, counts)
            mixed = mix(tokens.astype(np.uint64) + (place.astype(np.uint64) + np.uint64(1)) * _POSITION)
            hashes[first : last + 1] += np.add.reduceat(mixed, bounds[:-1] - start)
        return mix(hashes)

    return _cached(f"{data.digest}-hashes", find)


def _chunks(data: DocumentSource) -> Iterator[tuple[int, Ids]]:
    buffer = np.empty(min(CHUNK_TOKENS, max(1, data.n_tokens)), np.int64)
    for start in range(0, data.n_tokens, CHUNK_TOKENS):
        tokens = buffer[: min(CHUNK_TOKENS, data.n_tokens - start)]
        data.read(start, tokens)
        yield start, tokens


def _cached(name: str, find: Callable[[], Array]) -> Array:
    """Returns the array in the cache file of that name, which one process of the machine makes."""
    file = private_folder("documents") / f"{name}.npy"
    if (array := _load(file)) is not None:
        return array
    with lock(file.with_suffix(".lock")):
        if (array := _load(file)) is None:
            array = find()
            part = file.with_suffix(".part")
            with full_disk_is_an_error(str(file)):
                try:
                    with open(part, "wb") as body:
                        np.save(body, array, allow_pickle=False)
                    os.replace(part, file)
                finally:
                    part.unlink(missing_ok=True)
    return array


def _load(file: Path) -> Array | None:
    try:
        array: Array = np.load(file, allow_pickle=False)
        return array
    except (OSError, ValueError, EOFError):  # none yet, or torn: it is made again
        return None
