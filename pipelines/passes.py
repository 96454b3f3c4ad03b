"""The passes over a corpus. Each chunk is surveyed and encoded once, by any worker. If a build is killed, the next
build uses the stored results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raytide.core.io.storage import sha256
from raytide.core.specs.data import DataSpec
from raytide.pipelines.chunk_store import AlteredError, ChunkStore, chunk_key, has_versions, unpack_blob
from raytide.pipelines.cleaning.cleaner import Cleaner
from raytide.pipelines.cleaning.corpus.substrings import Cuts
from raytide.pipelines.cleaning.corpus_pass import CorpusCleaning
from raytide.pipelines.cleaning.fingerprints import Fingerprints
from raytide.pipelines.encode import ChunkStage, ChunkTask, EncodePlan
from raytide.pipelines.filter import Examiner
from raytide.pipelines.inputs import InputChunk
from raytide.pipelines.readers.base import ReadOptions
from raytide.pipelines.runners.inline import Runner
from raytide.pipelines.survey import ChunkSurvey, Corpus, Selection, corpus_from

Stage = Literal["survey", "learn", "encode", "done"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a build. Counts and rates are those of the current stage; in the stage `done`, the counts are
    those of the dataset.
    """

    stage: Stage
    documents: int
    tokens: int
    documents_per_s: float
    tokens_per_s: float
    documents_total: int
    """The number of documents that the dataset keeps; 0 until every document has been examined."""

    def as_report(self) -> dict[str, float | int | str]:
        return asdict(self)


OnProgress = Callable[[Progress], None]


class Reporter:
    """Counts the documents and tokens of a stage and reports them."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self.on_progress = on_progress
        self.total = 0
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


class NotExactError(Exception):
    """Raised when the encoding engine and `tokenizers` produce different ids for a document of this build."""


class Passes:
    """Surveys and encodes the chunks of a build, and holds the results of each chunk."""

    def __init__(
        self,
        spec: DataSpec,
        chunks: Sequence[InputChunk],
        store: ChunkStore,
        runner: Runner,
        report: Reporter,
        cleaner: Cleaner | None = None,
    ) -> None:
        self.chunks, self.store, self.runner, self.report = chunks, store, runner, report
        self.options, self.examiner = ReadOptions.from_spec(spec), Examiner(spec.filter, cleaner)
        self.cleaning = None if spec.cleaning is None else CorpusCleaning(spec.cleaning)
        self.cuts: dict[int, Cuts] = {}
        self.keeps_texts = spec.texts is not None
        self.surveys: list[ChunkSurvey | None] = [None] * len(chunks)
        self.lengths: list[NDArray[np.int64] | None] = [None] * len(chunks)
        self.done_bytes = 0
        """The bytes of input in the encoded chunks."""
        self.corpus: Corpus | None = None
        own = [4, asdict(self.options), spec.filter.model_dump(mode="json")]
        if spec.cleaning is not None and cleaner is not None:
            own += [5, spec.cleaning.model_dump(mode="json"), cleaner.identity()]  # 5: scrub version
        self._identity = json.dumps(own)
        """Everything except a chunk's parts that decides its texts."""
        self._stored = store.names()

    def survey(self) -> Corpus:
        """Examines every document of the corpus and returns the surveyed corpus."""
        self._run(None)
        return self._join()

    def encode(self, plan: EncodePlan) -> Corpus:
        """Encodes every document that passes the filter and cleaning. If `survey` has not examined the documents
        before, this call examines them first.

        Raises NotExactError if the engine is not exact. The caller then repeats the call with a plan that uses
        another engine.
        """
        self.done_bytes = 0
        self._run(plan)
        return self.corpus or self._join()

    def texts_name(self, chunk: InputChunk) -> str:
        return f"texts-{self._key(chunk)}"

    def tokens_name(self, chunk: InputChunk, plan: EncodePlan) -> str:
        return f"tokens-{self._key(chunk, _identity_of(plan) + _cut_identity(self.cuts.get(chunk.index, {})))}"

    def kept(self, chunk: InputChunk) -> NDArray[np.bool_]:
        """Returns a mask of a chunk's encoded documents: True for those that the dataset keeps."""
        assert self.corpus is not None
        start, end = self._bounds[chunk.index], self._bounds[chunk.index + 1]
        return self.corpus.found.keep[start:end][self.corpus.examined[start:end]]

    def _join(self) -> Corpus:
        self.corpus = corpus_from(self.chunks, [survey for survey in self.surveys if survey is not None])
        self._bounds = self.corpus.bounds()
        return self.corpus

    def _run(self, plan: EncodePlan | None) -> None:
        stage = ChunkStage(self.store, self.options, self.examiner, plan)
        sent: list[ChunkTask] = []
        for position, delivery in self.runner.map(stage, self._tasks(plan, sent)):
            if not delivery.is_stored:
                self.store.put(delivery.blobs)
            self._receive(sent[position], delivery.blobs)
            self._stored |= sent[position].names

    def _tasks(self, plan: EncodePlan | None, sent: list[ChunkTask]) -> Iterator[ChunkTask]:
        """Yields a task for each chunk that is not finished, and appends the task to `sent`, without the documents that
        it carries.
        """
        for chunk in self.chunks:
            task = self._task(chunk, plan)
            self._load(task)
            survey = self.surveys[chunk.index]
            if survey is None or not {task.survey, task.texts} - {""} <= self._stored:
                sent.append(task)
                yield task
            elif not task.names <= self._stored:
                sent.append(task)
                selection = Selection(chunk.parts, survey.found.keep, survey.found.digests.tobytes())
                yield replace(task, surveyed=selection, cuts=self.cuts.get(chunk.index, {}))

    def _task(self, chunk: InputChunk, plan: EncodePlan | None) -> ChunkTask:
        survey, texts = f"survey-{self._key(chunk)}", self.texts_name(chunk) if self.keeps_texts else ""
        if plan is None:
            return ChunkTask(chunk, survey, texts)
        tokens = self.tokens_name(chunk, plan)
        return ChunkTask(chunk, survey, texts, tokens.replace("tokens", "lengths", 1), tokens)

    def _load(self, task: ChunkTask) -> None:
        """Loads the results that an earlier run of this build has stored."""
        index = task.chunk.index
        for name, is_known in ((task.survey, self.surveys[index] is not None), (task.lengths, False)):
            if name in self._stored and not is_known:
                try:
                    self._receive(task, {name: self.store.get(name)})
                except AlteredError:
                    self._stored.discard(name)

    def _receive(self, task: ChunkTask, blobs: dict[str, bytes]) -> None:
        index = task.chunk.index
        if task.survey in blobs and self.surveys[index] is None:
            survey = ChunkSurvey.from_blob(blobs[task.survey], task.survey)
            if self.cleaning is not None:
                self.cleaning.add(index, survey.fingerprints, survey.cleaning)
            self.surveys[index] = replace(survey, fingerprints=Fingerprints())
            if not task.lengths:
                self.report.add(survey.found.documents)
        if task.lengths and task.lengths in blobs:
            arrays, about = unpack_blob(blobs[task.lengths], task.lengths)
            if not about["is_exact"]:
                raise NotExactError
            self.lengths[index] = lengths = arrays["lengths"]
            self.done_bytes += sum(part.size for part in task.chunk.parts)
            counted = lengths if self.corpus is None else lengths[self.kept(task.chunk)]
            self.report.add(len(counted), int(counted.sum()))

    def _key(self, chunk: InputChunk, extra: str = "") -> str:
        # A file without a version may have changed since an earlier run: only this run trusts its results.
        salt = "" if has_versions(chunk.parts) else self.store.token
        return chunk_key([self._identity, salt, extra], chunk.parts)


def _cut_identity(cuts: Cuts) -> str:
    return "".join(f" {i} {sha256(is_repeat.tobytes())}" for i, is_repeat in cuts.items())


def _identity_of(plan: EncodePlan) -> str:
    engine = [plan.engine.name, sha256(plan.engine.tokenizer), plan.engine.versions]
    return json.dumps([engine, plan.eos_id, plan.dtype, plan.is_marked])
