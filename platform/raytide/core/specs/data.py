"""The spec of a dataset build (input text, filters, tokenizer and output), and the registered versions of datasets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.io.html import ShownAsHtml
from raytide.core.io.token_dataset import ShardFormat, TokenManifest
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.cleaning import CleaningSpec

ReaderName = Literal["text", "jsonl", "parquet", "arrow", "tar", "html", "pdf"]
RecordKind = Literal["text", "messages", "preference"]

_NOT_OF_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
MIN_VOCAB_SIZE = 300
"""The smallest vocabulary: 256 bytes, the special tokens and some merges."""


_ADDED = ("readers", "records", "damaged", "texts", "cleaning")
"""Fields that enter the digest only where they are set, so that the digests of datasets from earlier releases stay the
same.
"""


class TextFilter(Config):
    """The limits by which documents are dropped. Text that is not UTF-8, and rows without text, are always dropped."""

    min_chars: int = Field(default=1, ge=1)
    max_chars: int | None = Field(default=None, ge=1)
    max_line_chars: int | None = Field(default=None, ge=1)
    """The most characters in a line; documents with a longer one are dropped, because it is usually minified code or
    data. None for no limit.
    """
    dedup: bool = True
    """True to keep only the first of several documents with the same bytes."""

    @model_validator(mode="after")
    def _order(self) -> TextFilter:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars {self.max_chars} is below min_chars {self.min_chars}")
        return self


class TrainTokenizer(Config):
    """Trains a byte-level BPE tokenizer on a random sample of the kept documents."""

    vocab_size: int = Field(default=4096, ge=MIN_VOCAB_SIZE, le=1 << 20)
    sample_documents: int = Field(default=10_000, ge=1)


class TokenizerSpec(Config):
    """The tokenizer of a dataset: trained by the build, or read from a file."""

    train: TrainTokenizer | None = None
    file: str | None = None
    """The URL of a `tokenizer.json`."""
    eos: str = "<|endoftext|>"
    """The token that ends each document; a tokenizer from a file must have it."""

    @model_validator(mode="after")
    def _one(self) -> TokenizerSpec:
        if (self.train is None) == (self.file is None):
            raise ValueError("give exactly one of train and file")
        return self


class DataSpec(Config):
    """The specification of a dataset build. The same inputs and specification give the same bytes, whatever the gang
    and the number of workers."""

    name: str = Field(default="dataset", min_length=1, max_length=100)
    team: str = "default"
    inputs: tuple[str, ...] = Field(min_length=1)
    """Files, globs or directories, as paths or fsspec URLs, readable from every node. JSONL, Parquet, Arrow and tar
    files hold many documents; any other file is one document."""
    include: tuple[str, ...] = ()
    """Suffixes of the files to read in directories, such as `.txt`; all files if empty."""
    exclude: tuple[str, ...] = ()
    """Names (with `*`) of files and directories to skip at any depth below an input directory."""
    readers: dict[str, ReaderName] = Field(default_factory=dict, max_length=64)
    """Readers by suffix, such as `{".log": "jsonl", ".html": "text"}`, in place of those that the suffix implies."""
    text_column: str = "text"
    """The column, JSON key or tar suffix that holds the text."""
    records: RecordKind = "text"
    """A record holds a text, a conversation (`messages`), or a preference pair (`prompt`, `chosen`, `rejected`)."""
    damaged: Literal["fail", "drop"] = "fail"
    """The handling of a damaged file, such as a truncated archive: `fail` fails the build, `drop` counts its unreadable
    rest as one dropped document.
    """
    filter: TextFilter = TextFilter()
    cleaning: CleaningSpec | None = None
    """Rules for each document, near-duplicates, repeated substrings and decontamination; see docs/cleaning.md."""
    tokenizer: TokenizerSpec = TokenizerSpec(train=TrainTokenizer())
    out: str = Field(min_length=1)
    """The dataset's directory, as a path or an fsspec URL."""
    format: ShardFormat = "bin"
    texts: Literal["jsonl", "parquet"] | None = None
    """The format in which the kept documents' text is also written; None writes only tokens."""
    shard_tokens: int = Field(default=1 << 24, ge=1)
    gang: GangSpec = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
    workers: int | None = Field(default=None, ge=1)
    """The number of processes in the whole gang; by default one for each whole CPU, fewer for a small corpus."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """The seconds without progress after which the build fails. Training the tokenizer counts as one step."""
    seed: int = 0
    """The seed that selects the documents for training the tokenizer."""

    @field_validator("gang")
    @classmethod
    def _has_cpus(cls, gang: GangSpec) -> GangSpec:
        if any(shape.resources.get("CPU", 0.0) <= 0 for shape in gang.shapes):
            raise ValueError("a build needs CPUs")
        return gang

    @model_validator(mode="after")
    def _cut_texts(self) -> DataSpec:
        if self.texts is not None and self.cleaning is not None and self.cleaning.substrings is not None:
            raise ValueError("texts cannot be written with cleaning.substrings: they would hold what was cut out")
        return self

    @model_validator(mode="after")
    def _whole_turns(self) -> DataSpec:
        if self.records == "text" or self.cleaning is None:
            return self
        cuts = {
            "substrings": self.cleaning.substrings is not None,
            "c4": any(rules.c4 for rules in (self.cleaning.rules, *self.cleaning.sources.values())),
        }
        for name, is_set in cuts.items():
            if is_set:
                raise ValueError(f"cleaning.{name} cannot be combined with records {self.records}: it would cut turns")
        return self

    def digest(self, inputs: Iterable[tuple[str, int, str]], engines: Mapping[str, str] = {}) -> str:
        """Returns a hash of everything that determines the dataset's bytes: the specification, the (url, size, version)
        of each input, and the versions of the libraries that encode text.

        `engines` has these versions by library. The name, the team, the gang, the workers and the output path do not
        change the hash. Without `engines`, returns the hash of pipeline 1. That pipeline did not record library
        versions, and its specification had none of the fields in _ADDED.
        """
        body = self.model_dump(mode="json", exclude={"name", "team", "out", "gang", "workers", "stall_timeout_s"})
        for field in _ADDED:
            if body[field] == type(self).model_fields[field].get_default(call_default_factory=True):
                del body[field]
        whole: dict[str, object] = {"spec": body, "inputs": list(inputs), "pipeline": 2 if engines else 1}
        if engines:
            whole["engines"] = dict(engines)
        digest = hashlib.sha256()
        for text in json.JSONEncoder(sort_keys=True).iterencode(whole):
            digest.update(text.encode())
        return digest.hexdigest()


class DatasetVersionSpec(Config):
    """The registration of a finished dataset under a name. It repeats the key figures of the dataset's manifest."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    team: bounds.Name = "default"
    location: bounds.Location = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The SHA-256 of the dataset's manifest, which contains the SHA-256 of each of its files."""
    digest: str = Field(default="", max_length=64)
    """The hash of the spec and the inputs that it was built from."""
    job: bounds.Word = ""
    """The job that built it."""
    documents: int = Field(ge=0, lt=1 << 60)
    tokens: int = Field(ge=0, lt=1 << 60)
    vocab_size: int = Field(ge=1, le=1 << 32)
    read: int = Field(default=0, ge=0, lt=1 << 60)
    """The number of documents that were read, including dropped ones."""
    dropped: dict[bounds.Word, int] = Field(default_factory=dict, max_length=500)
    """The number of documents by the reason for dropping them."""
    config: dict[str, object] = Field(default_factory=dict)
    """The spec of the build; the API takes it from the job."""

    @classmethod
    def of(cls, manifest: TokenManifest, sha256: str, *, name: str, location: str, job: str = "") -> DatasetVersionSpec:
        """Returns the registration of the dataset that a manifest describes. `sha256` is the hash of the manifest's
        file. Characters that are not allowed in names become `-`."""
        source = manifest.source
        return cls(
            name=_NOT_OF_NAMES.sub("-", name).strip("-._")[:100] or "dataset",
            location=location,
            sha256=sha256,
            digest=source.digest,
            job=job,
            documents=manifest.documents,
            tokens=manifest.tokens,
            vocab_size=manifest.vocab_size,
            read=source.read,
            dropped={bounds.printable(reason, 256): count for reason, count in source.dropped.items()},
        )


@dataclass(frozen=True, slots=True)
class DatasetVersion(ShownAsHtml):
    """A registered version of a dataset, which never changes."""

    spec: DatasetVersionSpec
    version: int
    user: str
    created_at_s: float

    @property
    def id(self) -> str:
        return f"{self.spec.name}:{self.version}"


@dataclass(frozen=True, slots=True)
class RegisteredDataset(ShownAsHtml):
    """A registered dataset: its newest version, and the number of its versions."""

    name: str
    team: str
    versions: int
    newest: DatasetVersion


@dataclass(frozen=True, slots=True)
class DatasetUse(ShownAsHtml):
    """The training jobs that read a version of a dataset, and the registered models that were trained on it."""

    jobs: tuple[str, ...]
    models: tuple[str, ...]
