"""The token dataset format, which the pipeline writes and the trainer reads.

A dataset is a directory (a path or an fsspec URL) with `manifest.json`, `tokenizer.json`, `tokenizer_config.json` and
shards of raw little-endian token ids. Each document ends with `eos_id`; shards may split documents. The manifest is
written last: a directory without one is incomplete.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.errors import DataError
from raytide.core.io.storage import exists, join, open_url, read_bytes

MANIFEST = "manifest.json"
CONFIG = "tokenizer_config.json"
VERSION = 1

TokenDtype = Literal["uint16", "uint32"]
ShardFormat = Literal["bin", "parquet"]

ITEM_BYTES: dict[str, int] = {"uint16": 2, "uint32": 4}
CHUNK_BYTES = 1 << 20

MAX_MANIFEST_BYTES = 256 << 20
"""A shard takes 0.15 KiB of it."""

_REBUILD = "Build the dataset again."
_NAME = re.compile(r"[^\x00-\x1f\x7f\\/:]{1,255}")


def inside(value: str) -> str:
    """Returns the path if it stays inside its folder; raises ValueError for any other."""
    parts = value.split("/")
    if len(value) > 1024 or any(not _NAME.fullmatch(part) or part in (".", "..") for part in parts):
        raise ValueError("lies inside its dataset")
    return value


class Shard(Config):
    """A file of tokens; its path is relative to the dataset."""

    file: str
    tokens: int = Field(ge=0, lt=1 << 60)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @field_validator("file")
    @classmethod
    def _inside(cls, value: str) -> str:
        try:
            return inside(value)
        except ValueError as error:
            raise ValueError(f"a shard {error}, and {value[:100]!r} does not") from None


class Source(Config):
    """The origin of the tokens, which shows whether a build would give the same dataset again."""

    digest: str = ""
    """A hash of the spec and its inputs (names, sizes, versions)."""
    read: int = Field(default=0, ge=0)
    kept: int = Field(default=0, ge=0)
    dropped: dict[str, int] = Field(default_factory=dict)
    """The number of documents by the reason for dropping them."""


class TokenManifest(Config):
    """The content of `manifest.json`. Tokens are numbered in shard order, the same for every reader."""

    most_bytes: ClassVar[int] = bounds.MOST_FILE_BYTES

    version: Literal[1] = 1
    format: ShardFormat = "bin"
    tokenizer: str = "tokenizer.json"
    tokenizer_sha256: str | None = None
    vocab_size: int = Field(ge=1, le=1 << 32)
    eos_id: int = Field(ge=0)
    dtype: TokenDtype
    documents: int = Field(ge=0, lt=1 << 60)
    tokens: int = Field(ge=0, lt=1 << 60)
    shards: tuple[Shard, ...]
    source: Source = Source()

    @field_validator("tokenizer")
    @classmethod
    def _inside(cls, value: str) -> str:
        try:
            return inside(value)
        except ValueError as error:
            raise ValueError(f"the tokenizer {error}, and {value[:100]!r} does not") from None

    @model_validator(mode="after")
    def _adds_up(self) -> TokenManifest:
        names = [shard.file for shard in self.shards]
        taken = {MANIFEST, CONFIG, self.tokenizer}
        if len(set(names)) < len(names) or not taken.isdisjoint(names) or self.tokenizer in (MANIFEST, CONFIG):
            raise ValueError("two files have the same name")
        if sum(shard.tokens for shard in self.shards) != self.tokens:
            raise ValueError(f"the shards hold {sum(s.tokens for s in self.shards)} tokens, not {self.tokens}")
        if self.eos_id >= self.vocab_size:
            raise ValueError(f"eos_id {self.eos_id} is outside the vocabulary of {self.vocab_size}")
        if self.dtype == "uint16" and self.vocab_size > 1 << 16:
            raise ValueError(f"uint16 cannot hold a vocabulary of {self.vocab_size}")
        return self

    def to_bytes(self) -> bytes:
        """Serializes the manifest; equal manifests give equal bytes."""
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


def parse_manifest(text: bytes, where: str) -> TokenManifest:
    """Returns the manifest in `text`. Raises DataError if it is malformed."""
    try:
        if len(text) > MAX_MANIFEST_BYTES:
            raise ValueError(f"its {len(text)} bytes exceed {MAX_MANIFEST_BYTES}")
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}.", hint=_REBUILD) from None
    version = body.get("version", VERSION) if isinstance(body, dict) else None
    if version != VERSION:
        raise DataError(
            f"{where} has version {repr(version)[:100]}; this raytide reads {VERSION}.",
            hint="Build the dataset again, or use the raytide that wrote it.",
        )
    try:
        return TokenManifest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = ": ".join([*(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")])
        raise DataError(f"{where} is malformed: {what[:500]}.", hint=_REBUILD) from None


def verify(url: str) -> TokenManifest:
    """Reads all shards and the tokenizer. Raises DataError if the size or hash of one differs from the manifest."""
    manifest = load_manifest(url)
    if manifest.tokenizer_sha256 is not None:
        _check(join(url, manifest.tokenizer), None, manifest.tokenizer_sha256)
    for shard in manifest.shards:
        size = shard.tokens * ITEM_BYTES[manifest.dtype] if manifest.format == "bin" else None
        _check(join(url, shard.file), size, shard.sha256)
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
