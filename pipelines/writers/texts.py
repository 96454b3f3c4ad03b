"""Writes the texts of kept documents as gzipped JSON Lines or Parquet. Each text is written with the name of its source
file and its row in that file.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raytide.core.io.storage import join, sha256, write_bytes
from raytide.core.io.token_dataset import TextFile
from raytide.pipelines.chunk_store import ChunkStore, pack_blob, unpack_blob
from raytide.pipelines.readers.conversation import TURN_END_MARK, TURN_START_MARK

SAMPLES = "dropped.jsonl"
"""The file with a few dropped documents of each reason."""
TEXTS = "texts"
TEXT_NAME = re.compile(r"\d{5,}\.(jsonl\.gz|parquet)(\.[0-9a-f]{32}\.part)?")
FILE_CHARS = 64 << 20
"""The bytes of input at which a text file is full; the chunk that reaches this size is the file's last."""
SUFFIXES = {"jsonl": "jsonl.gz", "parquet": "parquet"}


def texts_blob(texts: Sequence[str]) -> bytes:
    """Packs and compresses the texts of a chunk."""
    import pyarrow as pa

    bodies = [text.encode() for text in texts]
    whole = b"".join(bodies)
    packed = np.frombuffer(pa.compress(whole, codec="zstd", asbytes=True), np.uint8)
    return pack_blob({"texts": packed, "sizes": np.array([*map(len, bodies)], np.int64)}, {"bytes": len(whole)})


def texts_from(blob: bytes, name: str) -> list[str]:
    """Returns the texts that `texts_blob` packed."""
    import pyarrow as pa

    arrays, about = unpack_blob(blob, name)
    size = about["bytes"]
    assert isinstance(size, int)
    whole = pa.decompress(arrays["texts"].tobytes(), size, codec="zstd", asbytes=True) if size else b""
    ends = np.cumsum(arrays["sizes"]).tolist()
    return [whole[start:end].decode() for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


@dataclass(frozen=True, slots=True)
class ChunkTexts:
    """The texts of one stored chunk, with a mask of the texts that the dataset keeps."""

    texts: str
    """The name of the chunk's texts in the store."""
    keep: NDArray[np.bool_]
    sources: tuple[tuple[str, int], ...]
    """The file and row of each kept text."""
    size: int
    """The size of the chunk's input in bytes."""


@dataclass(frozen=True, slots=True)
class TextPlan:
    number: int
    chunks: tuple[ChunkTexts, ...]


def plan_texts(chunks: Iterator[ChunkTexts]) -> Iterator[TextPlan]:
    """Yields plans for the text files of a dataset. Each file covers consecutive chunks."""
    number, group, size = 0, list[ChunkTexts](), 0
    for chunk in chunks:
        group.append(chunk)
        size += chunk.size
        if size >= FILE_CHARS:
            yield TextPlan(number, tuple(group))
            number, group, size = number + 1, [], 0
    if group:
        yield TextPlan(number, tuple(group))


@dataclass(frozen=True, slots=True)
class TextStage:
    """Writes text files from stored chunks, in a process that can reach both the chunks and `out`."""

    store: ChunkStore
    out: str
    form: Literal["jsonl", "parquet"]
    turns: tuple[str, str] | None = None
    """The tokens that are written for the marks of a conversation's turns."""

    def __call__(self, plan: TextPlan) -> TextFile | None:
        """Returns the written file; None in a process that cannot reach `out`: then the driver writes it."""
        return self.write(plan) if self.store.is_visible() else None

    def write(self, plan: TextPlan) -> TextFile:
        rows = [row for chunk in plan.chunks for row in self._rows(chunk)]
        data = _jsonl(rows) if self.form == "jsonl" else _parquet(rows)
        file = f"{TEXTS}/{plan.number:05d}.{SUFFIXES[self.form]}"
        write_bytes(join(self.out, file), data)
        return TextFile(file=file, sha256=sha256(data), documents=len(rows))

    def _rows(self, chunk: ChunkTexts) -> Iterator[dict[str, object]]:
        texts = texts_from(self.store.get(chunk.texts), chunk.texts)
        kept = (text for text, keep in zip(texts, chunk.keep, strict=True) if keep)
        for text, (file, row) in zip(kept, chunk.sources, strict=True):
            if self.turns is not None:
                text = text.replace(TURN_START_MARK, self.turns[0]).replace(TURN_END_MARK, self.turns[1])
            yield {"text": text, "file": file.encode(errors="replace").decode(), "row": row}


def _jsonl(rows: Sequence[dict[str, object]]) -> bytes:
    body = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return gzip.compress(body.encode(), mtime=0)


def _parquet(rows: Sequence[dict[str, object]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("text", pa.large_string()), ("file", pa.string()), ("row", pa.int64())])
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), schema), stream, compression="zstd")
    return stream.getvalue()
