"""Cut a stream of documents' tokens into shards. A shard is written whole or not at all; the manifest comes last."""

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
"""A shard, or the unfinished copy that a killed `write_bytes` leaves."""

Tokens = NDArray[np.unsignedinteger]


class Packer(ABC):
    """Takes tokens in the dataset's order. Where it cuts depends on them alone, not on the pieces they come in."""

    suffix: ShardFormat

    def __init__(self, out: str, shard_tokens: int, dtype: TokenDtype) -> None:
        self.out = out
        self.shard_tokens = shard_tokens
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.shards: list[Shard] = []

    @abstractmethod
    def add(self, tokens: Tokens, lengths: NDArray[np.int64]) -> None:
        """The tokens of whole documents, one after the other, and the length of each."""

    @abstractmethod
    def finish(self) -> tuple[Shard, ...]:
        """Write what is left; all shards in order."""

    def _write(self, data: bytes, tokens: int) -> None:
        file = f"{SHARDS}/{len(self.shards):05d}.{self.suffix}"
        write_bytes(join(self.out, file), data)
        self.shards.append(Shard(file=file, tokens=tokens, sha256=sha256(data)))


class BinPacker(Packer):
    """Raw little-endian ids, to be memory-mapped: each shard has exactly `shard_tokens`, the last what is left."""

    suffix = "bin"

    def __init__(self, out: str, shard_tokens: int, dtype: TokenDtype) -> None:
        super().__init__(out, shard_tokens, dtype)
        self.held = bytearray()
        self.shard_bytes = shard_tokens * ITEM_BYTES[dtype]

    def add(self, tokens: Tokens, lengths: NDArray[np.int64]) -> None:
        self.held += tokens.astype(self.dtype, copy=False).tobytes()
        while len(self.held) >= self.shard_bytes:
            self._write(bytes(self.held[: self.shard_bytes]), self.shard_tokens)
            del self.held[: self.shard_bytes]

    def finish(self) -> tuple[Shard, ...]:
        if self.held:
            self._write(bytes(self.held), len(self.held) // self.dtype.itemsize)
            self.held = bytearray()
        return tuple(self.shards)


class ParquetPacker(Packer):
    """A row for each document, in a column `tokens`; a shard ends with the document that reaches `shard_tokens`."""

    suffix = "parquet"

    def __init__(self, out: str, shard_tokens: int, dtype: TokenDtype) -> None:
        super().__init__(out, shard_tokens, dtype)
        self.held: list[Tokens] = []
        self.held_tokens = 0

    def add(self, tokens: Tokens, lengths: NDArray[np.int64]) -> None:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            self.held.append(document)
            self.held_tokens += len(document)
            if self.held_tokens >= self.shard_tokens:
                self._flush()

    def finish(self) -> tuple[Shard, ...]:
        if self.held:
            self._flush()
        return tuple(self.shards)

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        ids = pa.array(np.concatenate(self.held).astype(self.dtype, copy=False))
        ends = np.cumsum([0, *map(len, self.held)], dtype=np.int64)
        rows = pa.LargeListArray.from_arrays(pa.array(ends), ids)
        stream = io.BytesIO()
        pq.write_table(pa.table({"tokens": rows}), stream, compression="zstd")
        self._write(stream.getvalue(), self.held_tokens)
        self.held, self.held_tokens = [], 0


PACKERS: dict[ShardFormat, type[Packer]] = {"bin": BinPacker, "parquet": ParquetPacker}


def packer_for(spec: DataSpec, dtype: TokenDtype) -> Packer:
    return PACKERS[spec.format](spec.out, spec.shard_tokens, dtype)


def clear(out: str) -> None:
    """Remove what a build left in `out`, the manifest first so that nobody reads shards that are going.

    Only files with the names that a build gives: whatever else lies there stays.
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
