"""Reads the tokens of training sequences by the sequences' numbers."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from raytide.actors.trainer.data.local_copy import local_copy
from raytide.actors.trainer.data.order.shuffle import Ids
from raytide.actors.trainer.data.shard_cache import ShardCache
from raytide.actors.trainer.data.shard_check import ShardCheck
from raytide.actors.trainer.model.loss import IGNORE
from raytide.core.errors import DataError
from raytide.core.io.private_paths import check_opened, safe_opener
from raytide.core.io.token_dataset import CONFIG, ITEM_BYTES, MANIFEST, TokenManifest, parse_manifest
from raytide.core.specs.mixture import StreamSpec


class TokenDataset(Protocol):
    """A dataset of numbered training sequences. Every rank opens the dataset itself."""

    @property
    def name(self) -> str:
        """The path or URL of the dataset, for error messages."""

    @property
    def digest(self) -> str:
        """The hash of the content that `examples` returns."""

    @property
    def n_sequences(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def tokenizer_file(self) -> Path: ...

    @property
    def files(self) -> Mapping[str, Path]:
        """Tokenizer files to export with the model, by file name."""

    @property
    def template(self) -> Mapping[str, Path]:
        """The chat template with which the data was rendered, as a mapping from the template's file name to its path.
        The mapping is empty if the data was rendered with the model's own template, or without a template.
        """

    def examples(self, ids: Ids) -> tuple[Ids, Ids]:
        """Returns inputs and targets, each of shape [len(ids), seq_len]. Targets that the loss must ignore are
        IGNORE.
        """


class Rows(NamedTuple):
    """Whole sequences, not yet split into inputs and targets. Augmentation works on this form."""

    tokens: Ids
    """The tokens of the sequences [rows, seq_len + 1]."""
    learnt: npt.NDArray[np.bool_]
    """[rows, seq_len]: True if the token that follows the position is its target."""
    documents: Ids
    """[rows, seq_len]: the number of each token's document in its row, ascending; padding is a document too."""

    def examples(self) -> tuple[Ids, Ids]:
        return self.tokens[:, :-1], np.where(self.learnt, self.tokens[:, 1:], IGNORE)


class RowData(TokenDataset, Protocol):
    """A token dataset whose sequences can be augmented."""

    @property
    def n_tokens(self) -> int:
        """The number of tokens in all sequences."""

    def rows(self, ids: Ids) -> Rows: ...

    def attention_pairs(self, ids: Ids) -> Ids | None:
        """Returns, for each row, the sum of the squared lengths of its documents, without reading tokens. Returns None
        if the lengths are not known.
        """

    def prefetch(self, ids: Ids) -> None:
        """Starts to fetch the remote data of these rows, if the dataset is remote."""


class TokenData:
    """Sequences of `seq_len` + 1 tokens (inputs and targets) from memory-mapped shards.

    A remote dataset is first copied to this machine. With `stream`, its shards are instead copied one by one as they
    are read. A damaged shard raises DataError when it is opened or fetched. In a large dataset, the error may come in a
    later call of `examples`.
    """

    def __init__(self, dataset: str, seq_len: int, stream: StreamSpec | None = None) -> None:
        streams = stream is not None and "://" in dataset
        self.name, self.path = dataset, local_copy(dataset, with_shards=not streams)
        self.manifest, self.digest = _manifest(self.path)
        self.vocab_size, self.eos_id = self.manifest.vocab_size, self.manifest.eos_id
        self.tokenizer_file = self.path / self.manifest.tokenizer
        files = {"tokenizer.json": self.tokenizer_file, CONFIG: self.path / CONFIG}
        self.files = {name: file for name, file in files.items() if file.is_file()}
        self.template: dict[str, Path] = {}
        self.seq_len, self.n_tokens = seq_len, self.manifest.tokens
        self.location = dataset if streams else str(self.path)
        shards = [shard for shard in self.manifest.shards if shard.tokens]
        self._ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64)
        self._cache: ShardCache | None = None
        self._mapped: list[npt.NDArray[np.unsignedinteger]] = []
        if stream is not None and streams:
            self._cache = ShardCache(dataset, self.manifest, self.digest, int(stream.cache_gb * 1e9))
        else:
            self._mapped = [self._map(shard.file, shard.tokens) for shard in shards]
        self.n_sequences = max(self.manifest.tokens - 1, 0) // seq_len
        if self.n_sequences < 1:
            raise DataError(
                f"{dataset} holds {self.manifest.tokens} tokens, too few for one sequence of {seq_len} and its target.",
                hint="Build a larger dataset, or lower seq_len.",
            )
        dtype = self.manifest.dtype  # shards of a stream are hashed as they arrive
        self._check = ShardCheck(dataset, self.path, () if streams else shards, dtype, self.vocab_size)
        weakref.finalize(self, self._check.close)
        self._check.begin()
        self._check.wait()

    def examples(self, ids: Ids) -> tuple[Ids, Ids]:
        """Returns inputs and targets. Every target counts towards the loss."""
        self.check()
        tokens = self.batch(ids)
        return tokens[:, :-1], tokens[:, 1:]

    def rows(self, ids: Ids) -> Rows:
        """Returns rows in which every token is a target, even the first token of a document. A document ends with its
        end token.
        """
        self.check()
        tokens = self.batch(ids)
        ends = tokens[:, :-1] == self.eos_id
        return Rows(tokens, np.ones(ends.shape, np.bool_), np.cumsum(ends, axis=1) - ends)

    def check(self) -> None:
        """Raises the error of a damaged shard, if one has been found."""
        self._check.check()

    def attention_pairs(self, ids: Ids) -> Ids | None:
        return None

    def prefetch(self, ids: Ids) -> None:
        self.prefetch_tokens(ids * self.seq_len, ids * self.seq_len + self.seq_len)

    def prefetch_tokens(self, firsts: Ids, lasts: Ids) -> None:
        """Starts to fetch the shards of several token ranges. Range i is from `firsts[i]` to `lasts[i]`, both
        included.
        """
        if self._cache is not None:
            pairs = zip(*(np.searchsorted(self._ends, each, side="right") for each in (firsts, lasts)), strict=True)
            last_shard = len(self._ends) - 1
            self._cache.prefetch(
                sorted({shard for begin, end in pairs for shard in range(int(begin), min(int(end), last_shard) + 1)})
            )

    def batch(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Returns tokens of shape [len(ids), seq_len + 1]. Sequence i starts at token i * seq_len of the dataset."""
        out = np.empty((len(ids), self.seq_len + 1), dtype=np.int64)
        for row, index in enumerate(ids):
            self.read(int(index) * self.seq_len, out[row])
        return out

    def read(self, start: int, out: Ids) -> None:
        """Fills `out` with the dataset's tokens from `start` on."""
        shard, done = int(np.searchsorted(self._ends, start, side="right")), 0
        while done < len(out):
            tokens = self._mapped[shard] if self._cache is None else self._cache.read_shard(shard)
            at = start + done - (int(self._ends[shard]) - len(tokens))
            piece = tokens[at : at + len(out) - done]
            out[done : done + len(piece)] = piece
            done, shard = done + len(piece), shard + 1

    def _map(self, file: str, tokens: int) -> npt.NDArray[np.unsignedinteger]:
        path, dtype = self.path / file, self.manifest.dtype
        check_opened(str(path))
        size = path.stat().st_size if path.is_file() else -1
        if size != tokens * ITEM_BYTES[dtype]:
            state = "is missing" if size < 0 else f"has {size} bytes"
            raise DataError(
                f"{path} {state}; its manifest says {tokens} {dtype} tokens.", hint="Build the dataset again."
            )
        return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _manifest(path: Path) -> tuple[TokenManifest, str]:
    try:
        with open(path / MANIFEST, "rb", opener=safe_opener) as file:
            body = file.read()
    except OSError:
        raise DataError(
            f"{path} is not a token dataset: it has no {MANIFEST}.", hint="Build it with `raytide data build`."
        ) from None
    manifest = parse_manifest(body, str(path / MANIFEST))
    if manifest.format != "bin":
        raise DataError(f"{path} holds {manifest.format} shards.", hint='Build it with format "bin" to train on it.')
    return manifest, hashlib.sha256(body).hexdigest()
