"""The format of token datasets, which the data pipeline writes and the trainer reads.

A dataset is a directory (a path or an fsspec URL) with `manifest.json`, `tokenizer.json`, `tokenizer_config.json` and
shards of raw little-endian token ids. Each document ends with `eos_id`. A document may continue in the next shard.
Beside each shard, an index file lists the ends of its documents. The manifest is written last, so a directory without a
manifest is incomplete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.errors import DataError
from raytide.core.io.html import framed, table
from raytide.core.io.storage import exists, join, open_url, read_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MANIFEST = "manifest.json"
CONFIG = "tokenizer_config.json"
VERSION: Final = 2
"""Version 1 had no index of document ends. Both are read."""
END_BYTES = 8
"""The bytes of each number in an index: unsigned little-endian integers of 64 bits."""

TokenDtype = Literal["uint16", "uint32"]
ShardFormat = Literal["bin", "parquet"]

ITEM_BYTES: dict[str, int] = {"uint16": 2, "uint32": 4}
CHUNK_BYTES = 1 << 20

MAX_MANIFEST_BYTES = 256 << 20
"""The largest manifest; it has 0.35 KiB for each shard."""

_REBUILD = "Build the dataset again."
_NAME = re.compile(r"[^\x00-\x1f\x7f\\/:]{1,255}")


def _inside(what: str) -> AfterValidator:
    """Returns a validator which checks that a path stays inside its dataset."""

    def check(path: str) -> str:
        if len(path) > 1024 or any(not _NAME.fullmatch(part) or part in (".", "..") for part in path.split("/")):
            raise ValueError(f"{what} lies inside its dataset, and {path[:100]!r} does not")
        return path

    return AfterValidator(check)


class DatasetFile(Config):
    """A file that a manifest names. Its path is relative to the dataset's directory."""

    file: Annotated[str, _inside("a shard")]
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class DocumentIndex(DatasetFile):
    """The index file of one shard. For each document that ends in the shard, it has the exclusive end as a global token
    position, in increasing order."""

    documents: int = Field(ge=0, lt=1 << 60)


class Shard(DatasetFile):
    """A file of token ids. The shards of a dataset together hold all its tokens."""

    tokens: int = Field(ge=0, lt=1 << 60)
    index: DocumentIndex | None = None
    """The ends of its documents; None in datasets of version 1."""


class TextFile(DatasetFile):
    """A file with the text of the documents that were kept, in dataset order."""

    documents: int = Field(ge=0, lt=1 << 60)


class Source(Config):
    """The origin of the tokens. It shows whether a new build would give the same dataset."""

    digest: str = ""
    """A hash of the spec and its inputs (names, sizes, versions)."""
    read: int = Field(default=0, ge=0)
    kept: int = Field(default=0, ge=0)
    dropped: dict[str, int] = Field(default_factory=dict)
    """The number of documents by the reason for dropping them."""
    samples: DatasetFile | None = None
    """A few dropped documents of each reason, as JSON Lines with `reason`, `file`, `row`, `detail` and `text`."""
    cleaning: DatasetFile | None = None
    """The report of cleaning, as JSON: counts of changes, languages and lengths."""
    signatures: DatasetFile | None = None
    """The MinHash signatures of the kept documents, for later builds to compare with."""
    engine: str = ""
    """The library that encoded the tokens: the first of `engines`, or the second where the first did not give exact
    results.
    """
    engines: dict[str, str] = Field(default_factory=dict, max_length=8)
    """The versions of both libraries, which are part of the digest."""


class TokenManifest(Config):
    """The content of `manifest.json`. Tokens are numbered in the order of the shards, which is the same for every
    reader."""

    most_bytes: ClassVar[int] = bounds.MOST_FILE_BYTES

    version: Literal[1, 2] = VERSION
    format: ShardFormat = "bin"
    tokenizer: Annotated[str, _inside("the tokenizer")] = "tokenizer.json"
    tokenizer_sha256: str | None = None
    vocab_size: int = Field(ge=1, le=1 << 32)
    eos_id: int = Field(ge=0)
    dtype: TokenDtype
    documents: int = Field(ge=0, lt=1 << 60)
    tokens: int = Field(ge=0, lt=1 << 60)
    shards: tuple[Shard, ...]
    texts: tuple[TextFile, ...] = ()
    source: Source = Source()

    @model_validator(mode="after")
    def _adds_up(self) -> TokenManifest:
        names = [file.file for file in self.files]
        taken = {MANIFEST, CONFIG, self.tokenizer}
        if len(set(names)) < len(names) or not taken.isdisjoint(names) or self.tokenizer in (MANIFEST, CONFIG):
            raise ValueError("two files have the same name")
        if sum(shard.tokens for shard in self.shards) != self.tokens:
            raise ValueError(f"the shards hold {sum(s.tokens for s in self.shards)} tokens, not {self.tokens}")
        indices = [shard.index for shard in self.shards if shard.index is not None]
        if indices and (len(indices) < len(self.shards) or sum(i.documents for i in indices) != self.documents):
            raise ValueError(f"the indices do not hold the ends of {self.documents} documents")
        if self.eos_id >= self.vocab_size:
            raise ValueError(f"eos_id {self.eos_id} is outside the vocabulary of {self.vocab_size}")
        if self.dtype == "uint16" and self.vocab_size > 1 << 16:
            raise ValueError(f"uint16 cannot hold a vocabulary of {self.vocab_size}")
        return self

    @property
    def files(self) -> list[DatasetFile]:
        """All files whose hash is in the manifest."""
        beside = [self.source.samples, self.source.cleaning, self.source.signatures, *self.texts]
        return [file for file in [*chain(*((s, s.index) for s in self.shards)), *beside] if file is not None]

    def _repr_html_(self) -> str:
        rows = [
            ("tokens", f"{self.tokens:,}"),
            ("documents", f"{self.documents:,} of {self.source.read:,} read"),
            ("dropped", self.source.dropped),
            ("vocabulary", f"{self.vocab_size:,}"),
            ("shards", f"{len(self.shards):,} of {self.dtype}"),
        ]
        return framed(table("token dataset", ("", ""), rows))

    def to_bytes(self) -> bytes:
        """Returns the manifest as bytes. Equal manifests give equal bytes."""
        return (json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n").encode()


def dtype_for(vocab_size: int) -> TokenDtype:
    """Returns the narrowest dtype that holds every token id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def load_manifest(url: str) -> TokenManifest:
    """Returns the manifest of the dataset at `url`. Raises DataError if it is missing or malformed."""
    where = join(url, MANIFEST)
    if not exists(where):
        raise DataError(
            f"{url} is not a token dataset: it has no {MANIFEST}.",
            hint="Build it with `raytide data build`; an interrupted build leaves none.",
        )
    return parse_manifest(read_bytes(where), where)


def sha256_of(url: str) -> str:
    """Returns the SHA-256 of the manifest at `url`. It covers the whole dataset, because the manifest has the SHA-256
    of each file.
    """
    return hashlib.sha256(read_bytes(join(url, MANIFEST))).hexdigest()


def parse_manifest(text: bytes, where: str) -> TokenManifest:
    """Returns the manifest that `text` encodes. Raises DataError if the text is malformed."""
    try:
        if len(text) > MAX_MANIFEST_BYTES:
            raise ValueError(f"its {len(text)} bytes exceed {MAX_MANIFEST_BYTES}")
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}.", hint=_REBUILD) from None
    version = body.get("version", VERSION) if isinstance(body, dict) else None
    if version not in (1, VERSION) or isinstance(version, bool):
        raise DataError(
            f"{where} has version {repr(version)[:100]}; this raytide reads 1 and {VERSION}.",
            hint="Build the dataset again, or use the raytide that wrote it.",
        )
    try:
        return TokenManifest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = ": ".join([*(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")])
        raise DataError(f"{where} is malformed: {what[:500]}.", hint=_REBUILD) from None


def document_ends(url: str, manifest: TokenManifest) -> NDArray[np.int64]:
    """Returns the exclusive end of each document as a global token position, in increasing order: int64 [documents].

    A dataset of version 1 has no index. All its tokens are then read to find the ends: a document ends after each
    `eos_id`, or, in Parquet shards, at the end of its row. Raises DataError if an index contradicts the manifest.
    """
    import numpy as np

    if not all(shard.index is not None for shard in manifest.shards):
        found = list(_scanned_ends(url, manifest))
        return np.concatenate(found) if found else np.zeros(0, np.int64)
    ends = np.empty(manifest.documents, np.int64)
    done = 0
    for shard in manifest.shards:
        assert shard.index is not None
        body = read_bytes(join(url, shard.index.file))
        if len(body) != shard.index.documents * END_BYTES or hashlib.sha256(body).hexdigest() != shard.index.sha256:
            raise DataError(f"{join(url, shard.index.file)} was changed: it differs from its manifest.", hint=_REBUILD)
        ends[done : done + shard.index.documents] = np.frombuffer(body, "<u8")
        done += shard.index.documents
    if len(ends) and (ends[0] < 1 or ends[-1] > manifest.tokens or (np.diff(ends) < 1).any()):
        raise DataError(f"the document index of {url} is not an increasing list of token positions.", hint=_REBUILD)
    return ends


def _scanned_ends(url: str, manifest: TokenManifest) -> Iterator[NDArray[np.int64]]:
    """Yields, for each shard of a dataset without an index, the ends of its documents."""
    import numpy as np

    start = 0
    for shard in manifest.shards:
        where = join(url, shard.file)
        if manifest.format == "parquet":
            import pyarrow.parquet as pq

            fs, path = open_url(where)
            with fs.open(path, "rb") as stream:
                rows = pq.read_table(stream, columns=["tokens"]).column("tokens")
            lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in rows.chunks])
            yield start + np.cumsum(lengths, dtype=np.int64)
        else:
            tokens = np.frombuffer(read_bytes(where), np.dtype(manifest.dtype).newbyteorder("<"))
            yield start + 1 + np.flatnonzero(tokens == manifest.eos_id).astype(np.int64)
        start += shard.tokens


def verify(url: str) -> TokenManifest:
    """Reads all files of the dataset and returns its manifest. Raises DataError if the size or the hash of a file
    differs from the manifest."""
    manifest = load_manifest(url)
    if manifest.tokenizer_sha256 is not None:
        _check(join(url, manifest.tokenizer), None, manifest.tokenizer_sha256)
    for file in manifest.files:
        size = None
        if isinstance(file, Shard) and manifest.format == "bin":
            size = file.tokens * ITEM_BYTES[manifest.dtype]
        _check(join(url, file.file), size, file.sha256)
    return manifest


def _check(url: str, size: int | None, sha256: str) -> None:
    fs, path = open_url(url)
    digest, read = hashlib.sha256(), 0
    try:
        with fs.open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                read += len(chunk)
    except FileNotFoundError:
        raise DataError(f"{url} is missing.", hint=_REBUILD) from None
    if size is not None and read != size:
        raise DataError(f"{url} has {read} bytes; its manifest has {size}.", hint=_REBUILD)
    if digest.hexdigest() != sha256:
        raise DataError(f"{url} was changed: its SHA-256 differs from the manifest's.", hint=_REBUILD)
