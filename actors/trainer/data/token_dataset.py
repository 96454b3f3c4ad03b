"""Selects the sequences of each step and reads their tokens.

The ids of a step are a pure function of (seed, step). Runs that resume or resize see the same stream as an
uninterrupted one, so no data state is saved. A rank takes its slice of the step's ids.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from raytide.actors.trainer.data.local_copy import local_copy
from raytide.actors.trainer.data.shard_check import ShardCheck
from raytide.core.errors import DataError
from raytide.core.io.private_paths import check_opened, safe_opener
from raytide.core.io.token_dataset import CONFIG, ITEM_BYTES, MANIFEST, TokenManifest, parse_manifest

Ids = npt.NDArray[np.int64]
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class BatchSampler:
    """Shuffles all sequences anew in every epoch.

    The order is a keyed Feistel permutation: it takes no memory whatever the dataset's size and, unlike a library's
    shuffle, does not change between releases.
    """

    seed: int
    n_sequences: int
    global_batch: int

    def ids(self, step: int) -> Ids:
        """Returns the sequence ids of `step`, in order. A batch may continue into the next epoch."""
        place = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)
        epochs = place // self.n_sequences
        out = np.empty_like(place)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            out[in_epoch] = feistel_permutation(
                place[in_epoch] % self.n_sequences, self.n_sequences, f"{self.seed}/{epoch}"
            )
        return out


def rank_slice(count: int, rank: int, world: int) -> slice:
    """Returns the rank's contiguous slice of `count` items. Slices are disjoint, cover all items and differ in size by
    at most one."""
    return slice(count * rank // world, count * (rank + 1) // world)


def feistel_permutation(index: Ids, size: int, key: str) -> Ids:
    """Returns the image of each index under the bijection of [0, size) named by `key`: a Feistel network over the next
    power of four, applied again to values outside the range."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    out = index.astype(np.uint64)
    todo = np.ones(out.shape, dtype=bool)
    while todo.any():
        left, right = out[todo] >> np.uint64(half), out[todo] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        out[todo] = (left << np.uint64(half)) | right
        todo = out >= np.uint64(size)
    return out.astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class TokenDataset(Protocol):
    """Training sequences by number. Every rank opens the dataset itself."""

    @property
    def name(self) -> str:
        """The dataset's origin, for error messages."""
        ...

    @property
    def digest(self) -> str:
        """Hash of the content that `examples` returns."""
        ...

    @property
    def n_sequences(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def tokenizer_file(self) -> Path: ...

    @property
    def files(self) -> Mapping[str, Path]:
        """Tokenizer files to export with the model, by file name."""
        ...

    @property
    def template(self) -> Mapping[str, Path]:
        """The chat template that the data was rendered with, if it is not the model's own."""
        ...

    def examples(self, ids: Ids) -> tuple[Ids, Ids]:
        """Returns inputs and targets [len(ids), seq_len]; ignored targets are IGNORE."""
        ...


class TokenData:
    """Sequences of `seq_len` + 1 tokens (inputs and targets) from memory-mapped shards.

    DataError for a damaged shard: on opening, or, for a large dataset, at a later call of `examples`.
    """

    def __init__(self, dataset: str, seq_len: int) -> None:
        self.name, self.path = dataset, local_copy(dataset)
        self.manifest, self.digest = _manifest(self.path)
        self.vocab_size, self.eos_id = self.manifest.vocab_size, self.manifest.eos_id
        self.tokenizer_file = self.path / self.manifest.tokenizer
        files = {"tokenizer.json": self.tokenizer_file, CONFIG: self.path / CONFIG}
        self.files = {name: file for name, file in files.items() if file.is_file()}
        self.template: dict[str, Path] = {}
        self.seq_len = seq_len
        self._shards = [self._map(shard.file, shard.tokens) for shard in self.manifest.shards if shard.tokens]
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)
        self.n_sequences = max(self.manifest.tokens - 1, 0) // seq_len
        if self.n_sequences < 1:
            raise DataError(
                f"{dataset} holds {self.manifest.tokens} tokens, too few for one sequence of {seq_len} and its target.",
                hint="Build a larger dataset, or lower seq_len.",
            )
        shards, dtype = self.manifest.shards, self.manifest.dtype
        self._check = ShardCheck(dataset, self.path, shards, dtype, self.vocab_size)
        weakref.finalize(self, self._check.close)
        self._check.begin()
        self._check.wait()

    def examples(self, ids: Ids) -> tuple[Ids, Ids]:
        """Returns inputs and targets; no target is ignored."""
        self._check.check()
        tokens = self.batch(ids)
        return tokens[:, :-1], tokens[:, 1:]

    def batch(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Returns [len(ids), seq_len + 1] tokens; sequence i starts at token i * seq_len of the dataset."""
        out = np.empty((len(ids), self.seq_len + 1), dtype=np.int64)
        for row, index in enumerate(ids):
            self._read(int(index) * self.seq_len, out[row])
        return out

    def _read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        shard, done = int(np.searchsorted(self._ends, start, side="right")), 0
        while done < len(out):
            tokens = self._shards[shard]
            at = start + done - (int(self._ends[shard]) - len(tokens))
            piece = tokens[at : at + len(out) - done]
            out[done : done + len(piece)] = piece
            done, shard = done + len(piece), shard + 1

    def _map(self, file: str, tokens: int) -> npt.NDArray[np.unsignedinteger]:
        path, dtype = self.path / file, self.manifest.dtype
        check_opened(str(path))
        size = path.stat().st_size if path.is_file() else -1
        if size != tokens * ITEM_BYTES[dtype]:
            state = "is missing" if size < 0 else f"has {size} bytes"
            raise DataError(
                f"{path} {state}; its manifest says {tokens} {dtype} tokens.", hint="Build the dataset again."
            )
        return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _manifest(path: Path) -> tuple[TokenManifest, str]:
    try:
        with open(path / MANIFEST, "rb", opener=safe_opener) as file:
            body = file.read()
    except OSError:
        raise DataError(
            f"{path} is not a token dataset: it has no {MANIFEST}.", hint="Build it with `raytide data build`."
        ) from None
    manifest = parse_manifest(body, str(path / MANIFEST))
    if manifest.format != "bin":
        raise DataError(f"{path} holds {manifest.format} shards.", hint='Build it with format "bin" to train on it.')
    return manifest, hashlib.sha256(body).hexdigest()
