"""The spec of a dataset build: the input text, filters, tokenizer and output."""

from __future__ import annotations

import hashlib
import json

from pydantic import Field, field_validator, model_validator

from raytide.core.config import Config
from raytide.core.io.token_dataset import ShardFormat
from raytide.core.objects.gang import GangSpec, Shape

MIN_VOCAB_SIZE = 300
"""The smallest vocabulary: 256 bytes, the special tokens and some merges."""


class TextFilter(Config):
    """The filters that drop documents. Text that is not UTF-8, and rows without text, are always dropped."""

    min_chars: int = Field(default=1, ge=1)
    max_chars: int | None = Field(default=None, ge=1)
    max_line_chars: int | None = Field(default=None, ge=1)
    """The longest line allowed; minified code and data files have very long lines."""
    dedup: bool = True
    """Keep only the first of documents with the same bytes."""

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
    """The tokenizer: trained, or from a file."""

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
    """A dataset build. The same inputs and spec give the same bytes with any gang and number of workers."""

    name: str = Field(default="dataset", min_length=1, max_length=100)
    team: str = "default"
    inputs: tuple[str, ...] = Field(min_length=1)
    """Files, globs or directories, as paths or fsspec URLs, readable from every node. A `.parquet` file holds one
    document in each row, any other file is one document."""
    include: tuple[str, ...] = ()
    """Suffixes of the files to read in directories, such as `.txt`; all files if empty."""
    exclude: tuple[str, ...] = ()
    """Names (with `*`) of files and directories to skip at any depth below an input directory."""
    text_column: str = "text"
    filter: TextFilter = TextFilter()
    tokenizer: TokenizerSpec = TokenizerSpec(train=TrainTokenizer())
    out: str = Field(min_length=1)
    """The dataset's directory, as a path or an fsspec URL."""
    format: ShardFormat = "bin"
    shard_tokens: int = Field(default=1 << 24, ge=1)
    gang: GangSpec = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
    workers: int | None = Field(default=None, ge=1)
    """The number of tokenizing processes; by default one for each whole CPU of the lease."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """The build fails after this time without progress. Training the tokenizer counts as one step."""
    seed: int = 0
    """Selects the documents for training the tokenizer."""

    @field_validator("gang")
    @classmethod
    def _one_member(cls, gang: GangSpec) -> GangSpec:
        for shape in gang.shapes:
            if shape.members != 1:
                raise ValueError(f"a build has one member, not {shape.members}: request more CPUs for it")
            if shape.resources.get("CPU", 0.0) <= 0:
                raise ValueError("a build needs CPUs")
        return gang

    def digest(self, inputs: list[tuple[str, int, str]]) -> str:
        """Returns a hash of all that decides the dataset's bytes: the spec and the inputs' (url, size, version).

        Team, workers and output path do not change it.
        """
        body = self.model_dump(mode="json", exclude={"name", "team", "out", "gang", "workers", "stall_timeout_s"})
        text = json.dumps({"spec": body, "inputs": inputs, "pipeline": 1}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
