"""Builds a token dataset in steps: find files, survey, learn a tokenizer, encode, write.

Finished chunks stay stored until the dataset is complete, even if the build fails. There are three exceptions. If
the disk is full, or if every document is dropped, all chunks are deleted. If a stored chunk was altered, only that
chunk is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from raytide.core.errors import ConflictError, DataError, StorageError
from raytide.core.io.claim import Claim, committing
from raytide.core.io.storage import exists, is_full_disk, join, read_bytes, sha256, write_bytes
from raytide.core.io.token_dataset import (
    ITEM_BYTES,
    MANIFEST,
    DatasetFile,
    Shard,
    Source,
    TextFile,
    TokenManifest,
    dtype_for,
    load_manifest,
    verify,
)
from raytide.core.specs.data import DataSpec
from raytide.pipelines.chunk_store import AlteredError, ChunkStore, pack_blob, remove_partial, unpack_blob
from raytide.pipelines.cleaning.cleaner import Cleaner
from raytide.pipelines.cleaning.corpus_pass import NEAR, NEAR_EARLIER, REPEATED, CorpusCleaning, against_identity
from raytide.pipelines.encode import EncodePlan, LearnTask, learn_tokenizer
from raytide.pipelines.filter import describe, drop_duplicates
from raytide.pipelines.inputs import find_inputs, plan_chunks
from raytide.pipelines.passes import NotExactError, OnProgress, Passes, Progress, Reporter
from raytide.pipelines.readers.base import InputFile
from raytide.pipelines.runners.inline import Runner, local_runner
from raytide.pipelines.survey import Corpus
from raytide.pipelines.tokenizer.bpe import TURN_END, TURN_START, eos_id_of, load_bpe, tokenizer_config, vocab_size_of
from raytide.pipelines.tokenizer.engine import EngineSpec, choose_engine, engine_versions
from raytide.pipelines.writers.shards import ChunkTokens, ShardStage, clear, plan_shards
from raytide.pipelines.writers.texts import SAMPLES, ChunkTexts, TextStage, plan_texts

if TYPE_CHECKING:
    from raytide.pipelines.runners.gang import Members

__all__ = ["Progress", "build"]

SMALL_BYTES = 1 << 30
"""The largest corpus, in bytes, that is built without a cluster."""
P = TypeVar("P")
W = TypeVar("W")


def build(
    spec: DataSpec,
    members: Members | None = None,
    on_progress: OnProgress | None = None,
    *,
    runner: Runner | None = None,
) -> TokenManifest:
    """Builds the dataset and returns its manifest.

    `runner` does the work if it is given. Otherwise the work is done in the placement groups of `members`, which may
    change at any time. Without either, a corpus of at most SMALL_BYTES is built in this process, and a larger one on
    the connected Ray cluster. The result does not depend on where the work is done.

    The call is idempotent. If `out` holds a finished dataset of the same spec and inputs, the dataset is verified
    and returned. If its files were altered, it is built again. An unfinished dataset is continued from its finished
    chunks.

    Raises ConflictError if `out` holds a dataset of another spec or of other inputs, or if another build writes to
    `out`. If another build takes over `out` during this call, the call deletes nothing. Raises DataError if there
    are no input files or no document is kept. If the disk is full, raises StorageError and deletes the finished
    chunks too.
    """
    claim = Claim([spec.out])
    try:
        return _build(spec, claim, members, on_progress, runner)
    finally:
        claim.release()


def _build(
    spec: DataSpec, claim: Claim, members: Members | None, on_progress: OnProgress | None, runner: Runner | None
) -> TokenManifest:
    files = find_inputs(spec)
    if not files:
        raise DataError(
            f"dataset {spec.name}: no input files in {', '.join(spec.inputs)}.",
            hint="Check inputs, include and exclude.",
        )
    tokenizer_file = read_bytes(spec.tokenizer.file) if spec.tokenizer.file is not None else None
    cleaner = None if spec.cleaning is None else Cleaner(spec.cleaning)
    identity = _identity(files, spec, tokenizer_file, cleaner)
    if (finished := _finished(spec, identity)) is not None:
        remove_partial(spec.out)  # its build may have been killed just before
        return finished
    own = None if runner is not None else _runner_for(spec, files, members)
    try:
        return _Build(spec, claim, files, identity, runner or own or local_runner(1), on_progress, cleaner).run(
            tokenizer_file
        )
    finally:
        if own is not None:
            own.close()


def _runner_for(spec: DataSpec, files: list[InputFile], members: Members | None) -> Runner:
    size = sum(file.size for file in files)
    if members is None and size <= SMALL_BYTES:
        return local_runner(spec.workers)
    from raytide.pipelines.runners.gang import gang_runner

    return gang_runner(spec, members, size)


def _finished(spec: DataSpec, identity: list[tuple[str, int, str]]) -> TokenManifest | None:
    if not exists(join(spec.out, MANIFEST)):
        return None
    elsewhere = "Choose another out directory, or remove this one."
    try:
        manifest = load_manifest(spec.out)
    except DataError as error:
        raise ConflictError(f"{spec.out} holds something else: {error.message}", hint=elsewhere) from None
    # A dataset that was encoded with other versions of the libraries, or by an earlier release, is not built again.
    if manifest.source.digest != spec.digest(identity, manifest.source.engines):
        raise ConflictError(f"{spec.out} holds a dataset of another spec or of other inputs.", hint=elsewhere)
    try:
        return verify(spec.out)
    except DataError:
        return None  # altered since: build it again


class _Build:
    """Runs one build, from the found input files to the manifest."""

    def __init__(
        self,
        spec: DataSpec,
        claim: Claim,
        files: list[InputFile],
        identity: list[tuple[str, int, str]],
        runner: Runner,
        on_progress: OnProgress | None,
        cleaner: Cleaner | None,
    ) -> None:
        self.spec, self.claim, self.files, self.runner = spec, claim, files, runner
        self.engines = dict(engine_versions())
        self.digest = spec.digest(identity, self.engines)
        self.chunks = plan_chunks(spec, files)
        self.report = Reporter(on_progress)
        self.store = ChunkStore.create(spec.out, claim.token)
        self.passes = Passes(spec, self.chunks, self.store, runner, self.report, cleaner)
        self.item_bytes = 0

    def run(self, tokenizer_file: bytes | None) -> TokenManifest:
        with committing([self.spec.out], self.claim.token):
            clear(self.spec.out)
        try:
            manifest = self._run(tokenizer_file)
        except StorageError as error:
            if not is_full_disk(error):
                self._discard(keeps_chunks=True)
                raise
            needed = self._needed_bytes()
            self._discard()
            raise StorageError(
                f"dataset {self.spec.name}: {error.message.rstrip('.')}; {self.spec.out} needs about "
                f"{needed / 1e9:.3f} GB.",
                hint="Free that much space and build again, or choose another out. Partial output was removed.",
            ) from error
        except _EmptyCorpusError:
            self._discard()
            raise
        except AlteredError as error:
            self._discard(keeps_chunks=True, altered=error.name)
            raise
        except BaseException:
            self._discard(keeps_chunks=True)
            raise
        finally:
            if self.passes.cleaning is not None:
                self.passes.cleaning.close()
        remove_partial(self.spec.out)
        self.report.emit("done")
        return manifest

    def _run(self, tokenizer_file: bytes | None) -> TokenManifest:
        cuts_texts = self.spec.cleaning is not None and self.spec.cleaning.substrings is not None
        if tokenizer_file is None or cuts_texts:
            self.report.start("survey")
            self._corpus_steps(self.passes.survey())
        if tokenizer_file is None:
            tokenizer, where = self._learned(), "the learned tokenizer"
        else:
            tokenizer, where = tokenizer_file, str(self.spec.tokenizer.file)
        loaded = load_bpe(tokenizer, where)
        vocab_size = vocab_size_of(loaded)
        plan = EncodePlan(
            choose_engine(tokenizer),
            eos_id_of(loaded, self.spec.tokenizer.eos, where),
            dtype_for(vocab_size),
            self.spec.records != "text",
        )
        self.item_bytes = ITEM_BYTES[plan.dtype]
        plan = self._encode(plan)
        return self._write(plan, tokenizer, tokenizer_config(loaded, self.spec.tokenizer.eos), vocab_size)

    def _corpus_steps(self, corpus: Corpus) -> None:
        """The steps that need all documents' digests, before anything is learned or encoded."""
        if self.spec.filter.dedup:
            corpus.found = drop_duplicates(corpus.found)
        if self.passes.cleaning is not None:
            self._drop_by_cleaning(self.passes.cleaning, corpus)
        self.report.total = corpus.found.kept
        if corpus.found.kept == 0:
            reasons = describe(corpus.found.dropped())
            raise _EmptyCorpusError(
                f"dataset {self.spec.name}: the corpus is empty: none of {corpus.found.documents} documents in "
                f"{len(self.files)} files was kept ({reasons or 'the files have no rows'}).",
                hint="Loosen the filter, or check inputs and text_column.",
            )

    def _drop_by_cleaning(self, cleaning: CorpusCleaning, corpus: Corpus) -> None:
        """Drops near-duplicates, then documents that consist of repeats."""
        numbers = np.flatnonzero(corpus.examined)
        near = cleaning.near_duplicates(corpus.found.keep[numbers])
        corpus.near = {int(numbers[i]): first if first < 0 else int(numbers[first]) for i, first in near.items()}
        for reason, is_earlier in ((NEAR, False), (NEAR_EARLIER, True)):
            dropped = [document for document, first in corpus.near.items() if (first < 0) == is_earlier]
            if dropped:
                corpus.found = corpus.found.drop(np.array(dropped), reason)
        self.passes.cuts, empty = cleaning.repeats(corpus.found.keep[numbers])
        if len(empty):
            corpus.found = corpus.found.drop(numbers[empty], REPEATED)

    def _learned(self) -> bytes:
        name = f"tokenizer-{self.digest}"
        if name in self.store.names():
            with suppress(AlteredError):  # then it is learned anew
                return unpack_blob(self.store.get(name), name)[0]["file"].tobytes()
        train, corpus = self.spec.tokenizer.train, self.passes.corpus
        assert train is not None
        assert corpus is not None
        self.report.start("learn")
        sample = corpus.sample(train.sample_documents, self.spec.seed)
        task = LearnTask(sample, self.passes.options, self.passes.examiner, train, self.runner.threads)
        learned = self.runner.run(learn_tokenizer, task)
        self.store.put({name: pack_blob({"file": np.frombuffer(learned, np.uint8)}, {})})
        return learned

    def _encode(self, plan: EncodePlan) -> EncodePlan:
        """Encodes the corpus, and returns the plan that was used: if the first engine is not exact, `tokenizers`
        encodes instead.
        """
        was_surveyed = self.passes.corpus is not None
        for engine in dict.fromkeys((plan.engine.name, "tokenizers")):
            plan = EncodePlan(
                EngineSpec(engine, plan.engine.tokenizer, plan.engine.versions),
                plan.eos_id,
                plan.dtype,
                plan.is_marked,
            )
            self.report.start("encode")
            try:
                corpus = self.passes.encode(plan)
                break
            except NotExactError:
                continue
        if not was_surveyed:
            self._corpus_steps(corpus)
        return plan

    def _write(self, plan: EncodePlan, tokenizer: bytes, config: bytes, vocab_size: int) -> TokenManifest:
        shards = self._write_shards(plan)
        texts = self._write_texts() if self.spec.texts is not None else ()
        corpus = self.passes.corpus
        assert corpus is not None
        report, signatures = (None, None) if self.passes.cleaning is None else self.passes.cleaning.write(self.spec.out)
        manifest = TokenManifest(
            format=self.spec.format,
            tokenizer_sha256=sha256(tokenizer),
            vocab_size=vocab_size,
            eos_id=plan.eos_id,
            dtype=plan.dtype,
            documents=corpus.found.kept,
            tokens=sum(shard.tokens for shard in shards),
            shards=shards,
            texts=texts,
            source=Source(
                digest=self.digest,
                read=corpus.found.documents,
                kept=corpus.found.kept,
                dropped=corpus.found.dropped(),
                samples=self._write_samples(corpus),
                cleaning=report,
                signatures=signatures,
                engine=plan.engine.name,
                engines=self.engines,
            ),
        )
        write_bytes(join(self.spec.out, manifest.tokenizer), tokenizer)
        write_bytes(join(self.spec.out, "tokenizer_config.json"), config)
        with committing([self.spec.out], self.claim.token):
            write_bytes(join(self.spec.out, MANIFEST), manifest.to_bytes())
        self.report.documents, self.report.tokens = manifest.documents, manifest.tokens
        return manifest

    def _write_shards(self, plan: EncodePlan) -> tuple[Shard, ...]:
        chunks = []
        for chunk, lengths in zip(self.chunks, self.passes.lengths, strict=True):
            assert lengths is not None
            chunks.append(ChunkTokens(self.passes.tokens_name(chunk, plan), lengths, self.passes.kept(chunk)))
        stage = ShardStage(self.store, self.spec.out, self.spec.format)
        return tuple(self._written(stage, stage.write, plan_shards(chunks, self.spec.shard_tokens, self.spec.format)))

    def _write_texts(self) -> tuple[TextFile, ...]:
        assert self.spec.texts is not None
        turns = None if self.spec.records == "text" else (TURN_START, TURN_END)
        stage = TextStage(self.store, self.spec.out, self.spec.texts, turns)
        return tuple(self._written(stage, stage.write, plan_texts(self._chunk_texts())))

    def _chunk_texts(self) -> Iterator[ChunkTexts]:
        corpus = self.passes.corpus
        assert corpus is not None
        for chunk, sources in zip(self.chunks, corpus.kept_sources(), strict=True):
            size = sum(part.size for part in chunk.parts)
            yield ChunkTexts(self.passes.texts_name(chunk), self.passes.kept(chunk), sources, size)

    def _written(self, stage: Callable[[P], W | None], write: Callable[[P], W], plans: Iterable[P]) -> Sequence[W]:
        """Writes the files of all plans and returns them, in order. The driver writes the files that a worker cannot
        reach.
        """
        listed, files = list[P](), dict[int, W]()

        def sent() -> Iterator[P]:
            for plan in plans:
                listed.append(plan)
                yield plan

        for position, file in self.runner.map(stage, sent()):
            files[position] = file if file is not None else write(listed[position])
            self.claim.check()
            self.report.emit("encode")
        return [files[position] for position in range(len(listed))]

    def _write_samples(self, corpus: Corpus) -> DatasetFile | None:
        drops = corpus.sampled_drops(self.passes.options, self.passes.examiner)
        lines = [json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in drops]
        if not lines:
            return None
        body = "".join(lines).encode(errors="replace")
        write_bytes(join(self.spec.out, SAMPLES), body)
        return DatasetFile(file=SAMPLES, sha256=sha256(body))

    def _needed_bytes(self) -> int:
        """Returns the estimated bytes that the build needs on disk: the size of the dataset, extrapolated from the part
        encoded so far, and as much again for its chunks.
        """
        tokens = sum(int(lengths.sum()) for lengths in self.passes.lengths if lengths is not None)
        size = sum(part.size for chunk in self.chunks for part in chunk.parts)
        share = self.passes.done_bytes / size if size and self.passes.done_bytes else 1.0
        return int(2 * tokens * self.item_bytes / share)

    def _discard(self, *, keeps_chunks: bool = False, altered: str = "") -> None:
        """Removes the output and, unless `keeps_chunks`, the finished chunks; in any case the result `altered`. Removes
        nothing if another build has taken over the claim, because the files may be those of that build.
        """
        with suppress(ConflictError), committing([self.spec.out], self.claim.token):
            clear(self.spec.out)
            # Lengths say that their tokens exist, so they go first.
            self.store.remove([altered.replace("tokens-", "lengths-", 1), altered] if altered else [])
            if not (keeps_chunks and self.store.names()):
                remove_partial(self.spec.out)


class _EmptyCorpusError(DataError):
    """No document was kept, so there is no dataset to build."""


def _identity(
    files: list[InputFile], spec: DataSpec, tokenizer: bytes | None, cleaner: Cleaner | None
) -> list[tuple[str, int, str]]:
    inputs = [(file.url, file.size, file.version) for file in files]
    if tokenizer is not None:
        inputs.append((str(spec.tokenizer.file), len(tokenizer), sha256(tokenizer)))
    if cleaner is not None:
        inputs += [*cleaner.identity(), *against_identity(cleaner.spec)]
    return inputs
