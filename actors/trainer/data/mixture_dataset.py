"""Opens the data that a spec trains and evaluates on: one token dataset or a mixture of several. The rows are equal
slices of the token stream, or documents packed into rows.

The sequences of a mixture are numbered consecutively, source after source. To a reader, the mixture is one dataset.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from raytide.actors.models.tokenizer_files import tokenizer_digest
from raytide.actors.trainer.data.order.mixture import MixtureSampler, Phase, SourceSize, resolve_phases
from raytide.actors.trainer.data.order.shuffle import EVERYWHERE, BatchSampler, Ids, Shuffle, StepSampler
from raytide.actors.trainer.data.packed_dataset import PackedData
from raytide.actors.trainer.data.token_dataset import RowData, Rows, TokenData, TokenDataset
from raytide.core.errors import DataError
from raytide.core.specs.mixture import MixtureSpec
from raytide.core.specs.train import TrainSpec


class JoinedData:
    """A RowData that joins several datasets, one after the other."""

    def __init__(self, parts: Sequence[RowData], order: object = None) -> None:
        """`order` describes the order in which sequences are drawn; it becomes part of the digest."""
        _check_tokenizers(parts)
        first = parts[0]
        self._parts = parts
        self._ends = np.cumsum([part.n_sequences for part in parts])
        self.name = ", ".join(part.name for part in parts)
        self.n_sequences, self.n_tokens = int(self._ends[-1]), sum(part.n_tokens for part in parts)
        self.vocab_size, self.eos_id = max(part.vocab_size for part in parts), first.eos_id
        self.tokenizer_file: Path = first.tokenizer_file
        self.files: Mapping[str, Path] = first.files
        self.template: Mapping[str, Path] = first.template
        body = json.dumps([[part.digest for part in parts], order], sort_keys=True)
        self.digest = hashlib.sha256(body.encode()).hexdigest()

    def examples(self, ids: Ids) -> tuple[Ids, Ids]:
        return self.rows(ids).examples()

    def rows(self, ids: Ids) -> Rows:
        read = [(mine, part.rows(own)) for part, mine, own in self._split(ids)]
        place = np.argsort(np.concatenate([np.flatnonzero(mine) for mine, _ in read]))
        tokens, learnt, documents = (
            np.concatenate(each)[place] for each in zip(*(rows for _, rows in read), strict=True)
        )
        return Rows(tokens, learnt, documents)

    def attention_pairs(self, ids: Ids) -> Ids | None:
        out = np.empty(len(ids), np.int64)
        for part, mine, own in self._split(ids):
            pairs = part.attention_pairs(own)
            if pairs is None:
                return None
            out[mine] = pairs
        return out

    def prefetch(self, ids: Ids) -> None:
        for part, _, own in self._split(ids):
            part.prefetch(own)

    def _split(self, ids: Ids) -> list[tuple[RowData, np.ndarray[tuple[int], np.dtype[np.bool_]], Ids]]:
        """Returns each dataset that has some of `ids`, with a mask of those ids and their numbers in the dataset."""
        part_of = np.searchsorted(self._ends, ids, side="right")
        out = []
        for index in np.unique(part_of):
            mine = part_of == index
            out.append((self._parts[index], mine, ids[mine] - (int(self._ends[index - 1]) if index else 0)))
        return out


class MixtureData(JoinedData):
    """The joined sources of a mixture, with the mixture's phases. A phase has one share per source. The digest covers
    sources and phases.
    """

    def __init__(self, parts: Sequence[RowData], mixture: MixtureSpec, spec: TrainSpec) -> None:
        names = [source.label for source in mixture.sources]
        self.sources = tuple(
            SourceSize(name, part.n_sequences, part.n_tokens) for name, part in zip(names, parts, strict=True)
        )
        self.phases: tuple[Phase, ...] = resolve_phases(mixture, self.sources, spec.global_batch, spec.steps)
        super().__init__(parts, [names, [asdict(phase) for phase in self.phases]])


def open_tokens(spec: TrainSpec) -> TokenDataset:
    """Opens the dataset or the mixture that the spec trains on."""
    held_out = 0.0 if spec.eval is None or spec.eval.fraction is None else spec.eval.fraction
    if isinstance(spec.dataset, MixtureSpec):
        parts = [_open(source.dataset, spec, held_out) for source in spec.dataset.sources]
        return MixtureData(parts, spec.dataset, spec)
    assert spec.dataset is not None  # the spec requires a dataset or chat
    return _open(spec.dataset, spec, held_out)


def open_evaluation(spec: TrainSpec, training: TokenDataset) -> RowData:
    """Opens the held-out sequences of `spec.eval`. Raises DataError if their tokenizer differs from that of the
    training data.
    """
    assert spec.eval is not None  # the caller evaluates
    if spec.eval.dataset is None:
        urls, held_out = spec.datasets, spec.eval.fraction or 0.0
    else:
        urls, held_out = (spec.eval.dataset,), 0.0
    parts = [_open(url, spec, held_out, of_held_out=held_out > 0) for url in urls]
    _check_tokenizers([training, *parts])
    return parts[0] if len(parts) == 1 else JoinedData(parts)


def create_sampler(spec: TrainSpec, data: TokenDataset) -> StepSampler:
    shuffle = EVERYWHERE if spec.stream is None else Shuffle(spec.stream.block, spec.stream.window)
    if isinstance(data, MixtureData):
        return MixtureSampler(spec.seed, data.sources, data.phases, spec.global_batch, shuffle)
    return BatchSampler(spec.seed, data.n_sequences, spec.global_batch, shuffle)


def _open(url: str, spec: TrainSpec, held_out: float, *, of_held_out: bool = False) -> RowData:
    data = TokenData(url, spec.seq_len, spec.stream)
    return PackedData(data, held_out, of_held_out=of_held_out) if spec.packing == "best_fit" else data


def _check_tokenizers(parts: Sequence[TokenDataset]) -> None:
    """Raises DataError if the same token id means different tokens in different parts."""
    first = parts[0]
    for other in parts[1:]:
        same = other.eos_id == first.eos_id and other.vocab_size == first.vocab_size
        if not same or tokenizer_digest(other.tokenizer_file) != tokenizer_digest(first.tokenizer_file):
            raise DataError(
                f"{other.name} was made with another tokenizer than {first.name}.",
                hint="Build all sources with one tokenizer.json.",
            )
