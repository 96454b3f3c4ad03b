"""A token dataset on disk: what the pipeline writes and the trainer reads.

A directory (a path or an fsspec URL) with `manifest.json`, `tokenizer.json`, `tokenizer_config.json` and shards of raw
little-endian token ids. Each document ends with `eos_id`; shard boundaries fall anywhere. The manifest is written
last, so a directory without one holds nothing that may be read.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from raytide.core.config import Config
from raytide.core.errors import DataError
from raytide.core.storage import join, open_url, read_bytes

MANIFEST = "manifest.json"
VERSION = 1

TokenDtype = Literal["uint16", "uint32"]
ShardFormat = Literal["bin", "parquet"]

ITEM_BYTES: dict[str, int] = {"uint16": 2, "uint32": 4}
CHUNK_BYTES = 1 << 20


class Shard(Config):
    """One file of tokens, its path relative to the dataset."""

    file: str
    tokens: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @field_validator("file")
    @classmethod
    def _inside(cls, value: str) -> str:
        if value.startswith("/") or "://" in value or ".." in value.split("/"):
            raise ValueError("a shard lies inside its dataset")
        return value


class Source(Config):
    """Where the tokens came from: enough to tell whether a build would repeat this one."""

    digest: str
    """Of the spec and of what it read (names, sizes, versions of the input files)."""
    read: int = Field(ge=0)
    kept: int = Field(ge=0)
    dropped: dict[str, int] = Field(default_factory=dict)
    """Documents by the reason why they were left out."""


class TokenManifest(Config):
    """`manifest.json`. Shard order is token order: token i of the dataset is the same for every reader."""

    version: Literal[1] = 1
    format: ShardFormat = "bin"
    tokenizer: str = "tokenizer.json"
    tokenizer_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    vocab_size: int = Field(ge=1)
    eos_id: int = Field(ge=0)
    dtype: TokenDtype
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    shards: tuple[Shard, ...]
    source: Source

    @model_validator(mode="after")
    def _adds_up(self) -> TokenManifest:
        if sum(shard.tokens for shard in self.shards) != self.tokens:
            raise ValueError(f"its shards hold {sum(s.tokens for s in self.shards)} tokens, not {self.tokens}")
        if self.eos_id >= self.vocab_size:
            raise ValueError(f"eos_id {self.eos_id} is outside the vocabulary of {self.vocab_size}")
        if self.format == "bin" and any(s.bytes != s.tokens * ITEM_BYTES[self.dtype] for s in self.shards):
            raise ValueError(f"a shard's bytes are not {ITEM_BYTES[self.dtype]} for each token")
        return self

    def to_bytes(self) -> bytes:
        """Stable: the same manifest gives the same bytes."""
        return (json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n").encode()


def dtype_for(vocab_size: int) -> TokenDtype:
    """The narrowest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def load_manifest(url: str) -> TokenManifest:
    """The manifest of the dataset at `url`, or a DataError that says what is wrong with it."""
    try:
        data = read_bytes(join(url, MANIFEST))
    except DataError:
        raise DataError(f"{url} holds no token dataset: it has no {MANIFEST}.", hint="Build it with `raytide data build`; a build that was cut off leaves none.") from None
    try:
        body = json.loads(data)
    except ValueError as error:
        raise DataError(f"{join(url, MANIFEST)} is not JSON: {error}.", hint="Build the dataset again.") from None
    version = body.get("version") if isinstance(body, dict) else None
    if version != VERSION:
        raise DataError(f"{join(url, MANIFEST)} has version {version!r}; this raytide reads {VERSION}.", hint="Build the dataset again, or use the raytide that wrote it.")
    try:
        return TokenManifest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        what = f"{field}: {first['msg']}" if field else first["msg"].removeprefix("Value error, ")
        raise DataError(f"{join(url, MANIFEST)} is malformed: {what}.", hint="Build the dataset again.") from None


def verify(url: str) -> TokenManifest:
    """Read every shard and the tokenizer, and compare sizes and hashes with the manifest; DataError names the first that differs."""
    manifest = load_manifest(url)
    _check(join(url, manifest.tokenizer), None, manifest.tokenizer_sha256)
    for shard in manifest.shards:
        _check(join(url, shard.file), shard.bytes, shard.sha256)
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
        raise DataError(f"{url} is missing.", hint="Build the dataset again.") from None
    if size is not None and read != size:
        raise DataError(f"{url} has {read} bytes, its manifest says {size}.", hint="It was cut off or changed: build the dataset again.")
    if digest.hexdigest() != sha256:
        raise DataError(f"{url} is not what was written: its SHA-256 differs from the manifest's.", hint="It was altered: build the dataset again.")
