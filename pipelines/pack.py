"""Packs a stream of documents' tokens into shards. Each shard is written atomically; the manifest comes last."""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from raytide.core.io.storage import join, open_url, sha256, write_bytes
from raytide.core.io.token_dataset import ITEM_BYTES, MANIFEST, Shard, ShardFormat, TokenDtype
from raytide.core.specs.data import DataSpec

SHARDS = "shards"
SHARD_NAME = re.compile(r"\d{5,}\.(bin|parquet)(\.[0-9a-f]{32}\.part)?")
"""A shard, or the unfinished copy of one that a killed `write_bytes` leaves."""

Tokens = NDArray[np.unsignedinteger]


class Packer(ABC):
    """Packs tokens in dataset order. Shard boundaries depend on the tokens alone, not on how they are batched."""

    suffix: ShardFormat

    def __init__(self, out: str, shard_tokens: int, dtype: TokenDtype) -> None:
        self.out = out
        self.shard_tokens = shard_tokens
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.shards: list[Shard] = []

    @abstractmethod
    def add(self, tokens: Tokens, lengths: NDArray[np.int64]) -> None:
        """Add the tokens of whole documents and the length of each."""

    @abstractmethod
    def finish(self) -> tuple[Shard, ...]:
        """Write the remaining tokens and return all shards in order."""

    def _write(self, data: bytes, tokens: int) -> None:
        file = f"{SHARDS}/{len(self.shards):05d}.{self.suffix}"
        write_bytes(join(self.out, file), data)
        self.shards.append(Shard(file=file, tokens=tokens, sha256=sha256(data)))


class BinPacker(Packer):
    """Raw little-endian ids for memory-mapping. Each shard has exactly `shard_tokens`, except the last."""

    suffix = "bin"

    def __init__(self, out: str, shard_tokens: int, dtype: TokenDtype) -> None:
        super().__init__(out, shard_tokens, dtype)
        self.pending = bytearray()
        self.shard_bytes = shard_tokens * ITEM_BYTES[dtype]

    def add(self, tokens: Tokens, lengths: NDArray[np.int64]) -> None:
        self.pending += tokens.astype(self.dtype, copy=False).tobytes()
        while len(self.pending) >= self.shard_bytes:
            self._write(bytes(self.pending[: self.shard_bytes]), self.shard_tokens)
            del self.pending[: self.shard_bytes]

    def finish(self) -> tuple[Shard, ...]:
        if self.pending:
            self._write(bytes(self.pending), len(self.pending) // self.dtype.itemsize)
            self.pending = bytearray()
        return tuple(self.shards)


class ParquetPacker(Packer):
    """One row per document, in a column `tokens`. A shard ends with the document that reaches `shard_tokens`."""

    suffix = "parquet"

    def __init__(self, out: str, shard_tokens: int, dtype: TokenDtype) -> None:
        super().__init__(out, shard_tokens, dtype)
        self.pending: list[Tokens] = []
        self.pending_tokens = 0

    def add(self, tokens: Tokens, lengths: NDArray[np.int64]) -> None:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            self.pending.append(document)
            self.pending_tokens += len(document)
            if self.pending_tokens >= self.shard_tokens:
                self._flush()

    def finish(self) -> tuple[Shard, ...]:
        if self.pending:
            self._flush()
        return tuple(self.shards)

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        ids = pa.array(np.concatenate(self.pending).astype(self.dtype, copy=False))
        ends = np.cumsum([0, *map(len, self.pending)], dtype=np.int64)
        rows = pa.LargeListArray.from_arrays(pa.array(ends), ids)
        stream = io.BytesIO()
        pq.write_table(pa.table({"tokens": rows}), stream, compression="zstd")
        self._write(stream.getvalue(), self.pending_tokens)
        self.pending, self.pending_tokens = [], 0


PACKERS: dict[ShardFormat, type[Packer]] = {"bin": BinPacker, "parquet": ParquetPacker}


def packer_for(spec: DataSpec, dtype: TokenDtype) -> Packer:
    return PACKERS[spec.format](spec.out, spec.shard_tokens, dtype)


def clear(out: str) -> None:
    """Remove a build's output from `out`, the manifest first, so that no reader opens shards being removed.

    Only files with names that a build uses are removed.
    """
    fs, path = open_url(out)
    manifest, shards = f"{path}/{MANIFEST}", f"{path}/{SHARDS}"
    if fs.exists(manifest):
        fs.rm_file(manifest)
    if not fs.exists(shards):
        return
    for file in fs.ls(shards, detail=False):
        if SHARD_NAME.fullmatch(file.rsplit("/", 1)[-1]):
            fs.rm_file(file)
    if not fs.ls(shards, detail=False):
        fs.rmdir(shards)
