"""Builds a token dataset: find, survey, learn, encode, pack. Nothing is written before the corpus has been checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from raytide.core.errors import ConflictError, DataError, StorageError
from raytide.core.io.claim import Claim
from raytide.core.io.storage import exists, is_full_disk, join, read_bytes, sha256, write_bytes
from raytide.core.io.token_dataset import (
    ITEM_BYTES,
    MANIFEST,
    Source,
    TokenDtype,
    TokenManifest,
    dtype_for,
    load_manifest,
    verify,
)
from raytide.core.specs.data import DataSpec
from raytide.pipelines.bpe import eos_id_of, load_bpe, tokenizer_config, vocab_size_of
from raytide.pipelines.encode import Encoder, learn_tokenizer
from raytide.pipelines.filter import describe
from raytide.pipelines.pack import clear, packer_for
from raytide.pipelines.ray_runner import ray_runner
from raytide.pipelines.read import InputFile, find_inputs, group_chunks, split_parts
from raytide.pipelines.runner import Runner
from raytide.pipelines.survey import Corpus, survey_corpus

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Stage = Literal["survey", "learn", "encode", "done"]

MAX_CHUNK_BYTES = 8 << 20
MIN_CHUNK_BYTES = 256 << 10
MAX_CHUNK_PARTS = 512
CHUNKS_PER_WORKER = 16
"""Chunks per worker: enough for an even load and frequent progress. The result does not depend on it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a build. Rates are those of the current stage."""

    stage: Stage
    documents: int
    tokens: int
    documents_per_s: float
    tokens_per_s: float
    documents_total: int
    """0 until the survey has counted them."""

    def as_report(self) -> dict[str, float | int | str]:
        return asdict(self)


OnProgress = Callable[[Progress], None]


def build(
    spec: DataSpec,
    placement_group: PlacementGroup | None = None,
    on_progress: OnProgress | None = None,
    *,
    runner: Runner | None = None,
) -> TokenManifest:
    """Run the build on the connected Ray cluster, inside the lease's placement group, and return its manifest.

    A `runner`, such as InlineRunner, replaces Ray.

    Idempotent: a finished dataset of the same spec and inputs is verified and returned; an unfinished or altered one is
    built again. ConflictError for a dataset of another spec or inputs, and while another build writes to `out`.
    """
    claim = Claim([spec.out])
    try:
        return _build(spec, placement_group, on_progress, runner)
    finally:
        claim.release()


def _build(
    spec: DataSpec, placement_group: PlacementGroup | None, on_progress: OnProgress | None, runner: Runner | None
) -> TokenManifest:
    files = find_inputs(spec)
    if not files:
        raise DataError(
            f"dataset {spec.name}: no input files in {', '.join(spec.inputs)}.",
            hint="Check inputs, include and exclude.",
        )
    tokenizer_file = read_bytes(spec.tokenizer.file) if spec.tokenizer.file is not None else None
    digest = spec.digest(_identity(files, spec, tokenizer_file))
    if (finished := _finished(spec, digest)) is not None:
        return finished
    runner = runner or ray_runner(spec, placement_group)
    report = _Reporter(on_progress)
    corpus = _survey(spec, files, runner, report)
    tokenizer = tokenizer_file if tokenizer_file is not None else _learn(spec, corpus, runner, report)
    clear(spec.out)
    try:
        return _write(spec, digest, corpus, tokenizer, runner, report)
    except StorageError as error:
        needed = _needed_bytes(report)
        clear(spec.out)
        if not is_full_disk(error):
            raise
        raise StorageError(
            f"dataset {spec.name}: {error.message.rstrip('.')}; {spec.out} needs about {needed / 1e9:.3f} GB.",
            hint="Free that much space and build again, or choose another out. Partial output was removed.",
        ) from error
    except BaseException:
        clear(spec.out)
        raise


def _needed_bytes(report: _Reporter) -> int:
    """Estimate the dataset's bytes from the share of documents encoded so far."""
    share = report.documents / report.total if report.documents and report.total else 1.0
    return int(report.tokens * report.item_bytes / share)


def _finished(spec: DataSpec, digest: str) -> TokenManifest | None:
    if not exists(join(spec.out, MANIFEST)):
        return None
    elsewhere = "Choose another out directory, or remove this one."
    try:
        manifest = load_manifest(spec.out)
    except DataError as error:
        raise ConflictError(f"{spec.out} holds something else: {error.message}", hint=elsewhere) from None
    if manifest.source.digest != digest:
        raise ConflictError(f"{spec.out} holds a dataset of another spec or of other inputs.", hint=elsewhere)
    try:
        return verify(spec.out)
    except DataError:
        return None  # altered since: build it again


def _survey(spec: DataSpec, files: list[InputFile], runner: Runner, report: _Reporter) -> Corpus:
    parts = split_parts(files, spec.text_column)
    even_bytes = sum(part.size for part in parts) // (runner.workers * CHUNKS_PER_WORKER)
    chunks = group_chunks(
        parts, chunk_bytes=min(max(even_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES), max_parts=MAX_CHUNK_PARTS
    )
    report.start("survey")
    corpus = survey_corpus(runner, chunks, spec.filter, spec.text_column, report.add)
    report.total = corpus.found.kept
    if corpus.found.kept == 0:
        reasons = describe(corpus.found.dropped())
        raise DataError(
            f"dataset {spec.name}: the corpus is empty: none of {corpus.found.documents} documents in {len(files)} "
            f"files was kept ({reasons or 'the files have no rows'}).",
            hint="Loosen the filter, or check inputs and text_column.",
        )
    return corpus


def _learn(spec: DataSpec, corpus: Corpus, runner: Runner, report: _Reporter) -> bytes:
    assert spec.tokenizer.train is not None
    report.start("learn")
    selections = corpus.sample(spec.tokenizer.train.sample_documents, spec.seed)
    learned: bytes = runner.run(learn_tokenizer, (selections, spec.text_column, spec.tokenizer.train, runner.threads))
    return learned


def _write(
    spec: DataSpec, digest: str, corpus: Corpus, tokenizer: bytes, runner: Runner, report: _Reporter
) -> TokenManifest:
    where = spec.tokenizer.file or "the learned tokenizer"
    loaded = load_bpe(tokenizer, where)
    vocab_size, eos_id = vocab_size_of(loaded), eos_id_of(loaded, spec.tokenizer.eos, where)
    dtype = dtype_for(vocab_size)
    packer, report.item_bytes = packer_for(spec, dtype), ITEM_BYTES[dtype]
    report.start("encode")
    for tokens, lengths in _encode(spec, corpus, tokenizer, eos_id, dtype, runner):
        packer.add(tokens, lengths)
        report.add(len(lengths), len(tokens))
    shards = packer.finish()
    manifest = TokenManifest(
        format=spec.format,
        tokenizer_sha256=sha256(tokenizer),
        vocab_size=vocab_size,
        eos_id=eos_id,
        dtype=dtype,
        documents=report.documents,
        tokens=report.tokens,
        shards=shards,
        source=Source(
            digest=digest, read=corpus.found.documents, kept=corpus.found.kept, dropped=corpus.found.dropped()
        ),
    )
    write_bytes(join(spec.out, manifest.tokenizer), tokenizer)
    write_bytes(join(spec.out, "tokenizer_config.json"), tokenizer_config(loaded, spec.tokenizer.eos))
    write_bytes(join(spec.out, MANIFEST), manifest.to_bytes())
    report.emit("done")
    return manifest


def _encode(
    spec: DataSpec, corpus: Corpus, tokenizer: bytes, eos_id: int, dtype: TokenDtype, runner: Runner
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    selections = [selection for selection in corpus.selections() if selection.keep.any()]
    for table in runner.map_in_order(selections, Encoder, actor_args=(tokenizer, eos_id, dtype, spec.text_column)):
        for row in table.to_pylist():
            yield (
                np.frombuffer(row["tokens"], np.dtype(dtype).newbyteorder("<")),
                np.frombuffer(row["lengths"], np.int64),
            )


def _identity(files: list[InputFile], spec: DataSpec, tokenizer: bytes | None) -> list[tuple[str, int, str]]:
    inputs = [(file.url, file.size, file.version) for file in files]
    if tokenizer is not None:
        inputs.append((str(spec.tokenizer.file), len(tokenizer), sha256(tokenizer)))
    return inputs


class _Reporter:
    """Counts a stage's documents and tokens and reports them."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self.on_progress = on_progress
        self.total = self.item_bytes = 0
        self.start("survey", emit=False)

    def start(self, stage: Stage, *, emit: bool = True) -> None:
        self.stage = stage
        self.documents = self.tokens = 0
        self.since_s = time.perf_counter()
        if emit:
            self.emit(stage)

    def add(self, documents: int, tokens: int = 0) -> None:
        self.documents += documents
        self.tokens += tokens
        self.emit(self.stage)

    def emit(self, stage: Stage) -> None:
        if self.on_progress is None:
            return
        spent_s = max(time.perf_counter() - self.since_s, 1e-9)
        self.on_progress(
            Progress(stage, self.documents, self.tokens, self.documents / spent_s, self.tokens / spent_s, self.total)
        )
