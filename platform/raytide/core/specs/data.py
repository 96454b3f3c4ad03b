"""What a dataset build is asked for: where the text is, what is left out, how it is tokenized, where the tokens go."""

from __future__ import annotations

import hashlib
import json

from pydantic import Field, field_validator, model_validator

from raytide.core.config import Config
from raytide.core.io.token_dataset import ShardFormat
from raytide.core.objects.gang import GangSpec, Shape

MIN_VOCAB_SIZE = 300
"""256 bytes, the special tokens and some merges."""


class TextFilter(Config):
    """Which documents are dropped. Text that is not UTF-8, and rows without text, always are."""

    min_chars: int = Field(default=1, ge=1)
    max_chars: int | None = Field(default=None, ge=1)
    max_line_chars: int | None = Field(default=None, ge=1)
    """Minified code and data files have very long lines."""
    dedup: bool = True
    """Of documents with the same bytes, only the first is kept."""

    @model_validator(mode="after")
    def _order(self) -> TextFilter:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars {self.max_chars} is below min_chars {self.min_chars}")
        return self


class TrainTokenizer(Config):
    """Learn a byte-level BPE from a random sample of the kept documents."""

    vocab_size: int = Field(default=4096, ge=MIN_VOCAB_SIZE, le=1 << 20)
    sample_documents: int = Field(default=10_000, ge=1)


class TokenizerSpec(Config):
    """Learn a tokenizer, or take a file."""

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
    """One dataset build. The same inputs and spec give the same bytes, whatever the gang and the workers."""

    name: str = Field(default="dataset", min_length=1, max_length=100)
    team: str = "default"
    inputs: tuple[str, ...] = Field(min_length=1)
    """Files, globs or directories, as paths or fsspec URLs. A `.parquet` file has one document in each row, any other
    file is one document. Every node of the gang must be able to read them."""
    include: tuple[str, ...] = ()
    """Suffixes of the files to take from directories, such as `.txt`; all files when empty."""
    exclude: tuple[str, ...] = ()
    """Names (with `*`) of files and directories to leave out at any depth below an input directory."""
    text_column: str = "text"
    filter: TextFilter = TextFilter()
    tokenizer: TokenizerSpec = TokenizerSpec(train=TrainTokenizer())
    out: str = Field(min_length=1)
    """The dataset's directory, a path or an fsspec URL."""
    format: ShardFormat = "bin"
    shard_tokens: int = Field(default=1 << 24, ge=1)
    gang: GangSpec = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
    workers: int | None = Field(default=None, ge=1)
    """Processes that tokenize; one for each whole CPU of the lease when left out."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """A build of which nothing new is done for so long fails. Learning the tokenizer is one thing."""
    seed: int = 0
    """Chooses the documents that the tokenizer learns from."""

    @field_validator("gang")
    @classmethod
    def _one_member(cls, gang: GangSpec) -> GangSpec:
        for shape in gang.shapes:
            if shape.members != 1:
                raise ValueError(f"a build runs in one member, not {shape.members}: give that member more CPUs")
            if shape.resources.get("CPU", 0.0) <= 0:
                raise ValueError("a build needs a member with CPUs")
        return gang

    def digest(self, inputs: list[tuple[str, int, str]]) -> str:
        """Of all that decides the dataset's bytes: the spec's content and the inputs' (url, size, version).

        Who builds it, with how many workers and where it goes change nothing in it.
        """
        body = self.model_dump(mode="json", exclude={"name", "team", "out", "gang", "workers", "stall_timeout_s"})
        text = json.dumps({"spec": body, "inputs": inputs, "pipeline": 1}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
