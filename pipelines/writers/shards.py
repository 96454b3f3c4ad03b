"""Divides a dataset's tokens into shards, and writes the shards.

The tokens of a shard depend only on the documents, so any worker can write any shard, in any order.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytide.core.io.storage import join, open_url, sha256, write_bytes, write_parts
from raytide.core.io.token_dataset import END_BYTES, MANIFEST, DocumentIndex, Shard, ShardFormat
from raytide.pipelines.chunk_store import ChunkStore, bytes_of, unpack_blob
from raytide.pipelines.cleaning.report import REPORT, SIGNATURES
from raytide.pipelines.writers.texts import SAMPLES, TEXT_NAME, TEXTS

SHARDS = "shards"
SHARD_NAME = re.compile(r"\d{5,}\.(bin|parquet|idx)(\.[0-9a-f]{32}\.part)?")
"""A shard or its index, or the unfinished copy of one that a killed `write_bytes` leaves."""
UNFINISHED_NAME = re.compile(r"(manifest|tokenizer|tokenizer_config|dropped)\.jsonl?\.[0-9a-f]{32}\.part")

Tokens = NDArray[np.unsignedinteger]
Lengths = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """The tokens of one stored chunk, with a mask of the documents that the dataset keeps."""

    tokens: str
    """The name of the chunk's tokens in the store."""
    lengths: Lengths
    """The number of tokens of each document of the chunk."""
    keep: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The plan of one shard. The shard contains the tokens `start` to `end` of the dataset.

    `ends` lists the positions in this shard at which documents end.
    """

    number: int
    start: int
    end: int
    ends: NDArray[np.int64]
    chunks: tuple[ChunkTokens, ...]
    """The chunks that hold these tokens."""
    skipped: int
    """Kept tokens of the first chunk that belong to shards before this one."""


def plan_shards(chunks: Sequence[ChunkTokens], shard_tokens: int, form: ShardFormat) -> Iterator[ShardPlan]:
    """Yields the plans of a dataset's shards, in order.

    A bin shard has exactly `shard_tokens` tokens, except the last one. A Parquet shard ends with the document that
    reaches `shard_tokens`.
    """
    kept = [chunk.lengths[chunk.keep] for chunk in chunks]
    ends = np.cumsum(np.concatenate([np.zeros(0, np.int64), *kept]))
    chunk_ends = np.cumsum([int(lengths.sum()) for lengths in kept], dtype=np.int64)
    start, number, total = 0, 0, int(ends[-1]) if len(ends) else 0
    while start < total:
        end = min(start + shard_tokens, total)
        if form == "parquet":
            end = int(ends[np.searchsorted(ends, end)])
        first, last = (int(np.searchsorted(chunk_ends, at, side="right")) for at in (start, end - 1))
        first_start = int(chunk_ends[first - 1]) if first else 0
        inside = ends[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, end, side="right")]
        yield ShardPlan(number, start, end, inside, tuple(chunks[first : last + 1]), start - first_start)
        start, number = end, number + 1


@dataclass(frozen=True, slots=True)
class ShardStage:
    """Writes shards from stored chunks, in a process that can reach both the chunks and `out`."""

    store: ChunkStore
    out: str
    form: ShardFormat

    def __call__(self, plan: ShardPlan) -> Shard | None:
        """Returns the written shard; None in a process that cannot reach `out`: then the driver writes it."""
        return self.write(plan) if self.store.is_visible() else None

    def write(self, plan: ShardPlan) -> Shard:
        pieces: list[Tokens] = []
        missing, skipped = plan.end - plan.start, plan.skipped
        for chunk in plan.chunks:
            pieces.append(self._kept(chunk)[skipped : skipped + missing])
            missing, skipped = missing - len(pieces[-1]), 0
        return write_shard(self.out, plan, pieces, self.form)

    def _kept(self, chunk: ChunkTokens) -> Tokens:
        arrays, _ = unpack_blob(self.store.get(chunk.tokens), chunk.tokens)
        return arrays["tokens"] if chunk.keep.all() else arrays["tokens"][np.repeat(chunk.keep, chunk.lengths)]


def write_shard(out: str, plan: ShardPlan, pieces: Sequence[Tokens], form: ShardFormat) -> Shard:
    """Writes a shard and its index from the tokens of the shard's chunks. Each file is written atomically."""
    name = f"{SHARDS}/{plan.number:05d}"
    data = [bytes_of(piece) for piece in pieces] if form == "bin" else [_parquet(np.concatenate(pieces), plan)]
    index = plan.ends.astype("<u8").tobytes()
    write_parts(join(out, f"{name}.{form}"), data)
    write_bytes(join(out, f"{name}.idx"), index)
    documents = DocumentIndex(file=f"{name}.idx", documents=len(index) // END_BYTES, sha256=sha256(index))
    tokens = sum(map(len, pieces))
    return Shard(file=f"{name}.{form}", tokens=tokens, sha256=sha256(*data), index=documents)


def _parquet(tokens: Tokens, plan: ShardPlan) -> bytes:
    """Returns a Parquet file with a column `tokens` and a row for each document."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ends = np.concatenate([np.zeros(1, np.int64), plan.ends - plan.start])
    rows = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(tokens))
    stream = io.BytesIO()
    pq.write_table(pa.table({"tokens": rows}), stream, compression="zstd")
    return stream.getvalue()


def clear(out: str) -> None:
    """Removes a build's output from `out`. The manifest is removed first, so that no reader opens shards that are being
    removed.

    Only files with names that a build uses are removed.
    """
    fs, path = open_url(out)
    for name in (MANIFEST, SAMPLES, REPORT, SIGNATURES):
        if fs.exists(f"{path}/{name}"):
            fs.rm_file(f"{path}/{name}")
    for folder, pattern in ((SHARDS, SHARD_NAME), (TEXTS, TEXT_NAME), ("", UNFINISHED_NAME)):
        inside = f"{path}/{folder}".rstrip("/")
        fs.invalidate_cache()
        if not fs.exists(inside):
            continue
        for file in fs.ls(inside, detail=False):
            if pattern.fullmatch(file.rsplit("/", 1)[-1]):
                fs.rm_file(file)
        # In an object store, a folder is gone with its last file.
        if folder and fs.exists(inside) and not fs.ls(inside, detail=False):
            fs.rmdir(inside)
