"""Evaluates a model on a suite. The CLI, workflows, compression and the registry all call `evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from raytide.actors.models.families import read_architecture
from raytide.actors.models.tokenizer_files import tokenizer_digest
from raytide.actors.quality.corpus import CorpusReader
from raytide.actors.quality.divergence import CorpusQuality, QualitySums, divergence, negative_log_likelihood
from raytide.actors.quality.scorers import DirectoryScorer, EndpointScorer
from raytide.actors.quality.suite import HeldOutText, QualityGate, QualitySuite, broken_limits, check_gate
from raytide.actors.quality.tasks import TaskQuality, run_tasks
from raytide.core.errors import ConfigError, DataError

OnCorpus = Callable[[str, int, int], None]
"""Called with a corpus's name, the tokens done and those to do."""

_WORST_IS_LEAST = ("same_top1", "accuracy", "parent_accuracy")
_WINDOW = 512
_COUNTS = ("tokens", "samples")


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The results of a suite."""

    model: str
    parent: str
    corpora: Mapping[str, CorpusQuality]
    tasks: Mapping[str, TaskQuality] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics, by the names under which they are recorded for a model version. For example, `code_kl`
        is the divergence on the corpus `code`, and `kl` is the largest divergence on any corpus. The gate limits the
        metrics that have no corpus or task in their name, such as `kl`.
        """
        found: dict[str, float] = {}
        worst: dict[str, float] = {}
        for name, values in self._named():
            for key, value in values.items():
                if value is None or key in _COUNTS:
                    continue
                found[f"{name}_{key}"] = value
                choose = min if key in _WORST_IS_LEAST else max
                worst[key] = choose(worst.get(key, value), value)
        return {**worst, **found}

    def to_json(self, gate: QualityGate | None = None) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "parent": self.parent,
            "corpora": {name: {**asdict(each), "ppl_change": each.ppl_change} for name, each in self.corpora.items()},
            "tasks": {name: asdict(each) for name, each in self.tasks.items()},
            "metrics": self.metrics(),
        }
        return body if gate is None else {**body, "broken": list(broken_limits(gate, self.metrics()))}

    def _named(self) -> list[tuple[str, dict[str, float | None]]]:
        corpora = [(name, {**asdict(each), "ppl_change": each.ppl_change}) for name, each in self.corpora.items()]
        return corpora + [(name, asdict(each)) for name, each in self.tasks.items()]


def evaluate(
    model: str,
    suite: QualitySuite,
    *,
    endpoint_model: str = "",
    api_key: str = "",
    on_progress: OnCorpus = lambda name, done, total: None,
) -> QualityReport:
    """Evaluates a model on a suite. `model` is a model directory, a run that exported a model, or the base URL of an
    endpoint.
    """
    check_gate(suite)
    at_endpoint = "://" in model
    if at_endpoint:
        _check_endpoint(suite)
    own_dir = None if at_endpoint else model_directory(model)
    parent_dir = model_directory(suite.parent) if suite.parent else None
    folders = [each for each in (own_dir, parent_dir) if each is not None]
    window = suite.window or min(_WINDOW, *(read_architecture(each).max_model_len for each in folders))
    parent = None if parent_dir is None else DirectoryScorer(parent_dir, suite.dtype, window)
    own: DirectoryScorer | EndpointScorer
    if own_dir is None:
        own = EndpointScorer(model, endpoint_model, api_key)
    else:
        own = DirectoryScorer(own_dir, suite.dtype, window, suite.quantized_input, suite.quantized_head)
        _check_same_tokens(own, parent)
    owner = parent or own
    assert isinstance(owner, DirectoryScorer)  # an endpoint has a parent
    reader = CorpusReader(owner.tokenizer(), owner.vocab_size, window)
    corpora = {name: _corpus(name, corpus, reader, own, parent, on_progress) for name, corpus in suite.corpora.items()}
    tasks: Mapping[str, TaskQuality] = {}
    if suite.tasks is not None:
        assert isinstance(own, DirectoryScorer)  # as _check_endpoint made sure
        tasks = run_tasks(suite.tasks, own, parent, window)
    return QualityReport(model, suite.parent, corpora, tasks)


def model_directory(path: str) -> Path:
    """Returns `path` if it is a model directory. If `path` is a run, returns the model directory that the run exported.
    Raises DataError otherwise.
    """
    for folder in (Path(path), Path(path) / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise DataError(
        f"{path} holds no model: neither it nor its model folder has a config.json.",
        hint="Give a Hugging Face model directory, a finished run, or the base URL of an endpoint.",
    )


def _corpus(
    name: str,
    corpus: HeldOutText,
    reader: CorpusReader,
    model: DirectoryScorer | EndpointScorer,
    parent: DirectoryScorer | None,
    on_progress: OnCorpus,
) -> CorpusQuality:
    sums = QualitySums()
    for window in reader.windows(corpus):
        if parent is None or not isinstance(model, DirectoryScorer):
            sums.add(model.nll(window), None if parent is None else parent.nll(window))
        else:
            model_TV, parent_TV = model.logits(window), parent.logits(window)
            targets_T = torch.tensor(window.targets, device=model_TV.device)
            sums.add(negative_log_likelihood(model_TV, targets_T), negative_log_likelihood(parent_TV, targets_T))
            sums.add_distributions(*divergence(parent_TV, model_TV))
        on_progress(name, sums.tokens, corpus.tokens)
    return sums.result()


def _check_endpoint(suite: QualitySuite) -> None:
    gate = suite.gate
    if not suite.parent:
        raise ConfigError(
            "an endpoint is compared with a parent directory, whose tokenizer it shares.", hint="Give parent."
        )
    if gate.max_kl is not None or gate.max_kl_p99 is not None or gate.min_same_top1 is not None:
        raise ConfigError(
            "an endpoint tells no whole distributions: max_kl, max_kl_p99 and min_same_top1 cannot be measured there.",
            hint="Use max_ppl_change, or evaluate the model's directory.",
        )
    if suite.tasks is not None:
        raise ConfigError(
            "tasks run on a model directory.", hint="Leave tasks out, or run lm_eval's local-completions yourself."
        )


def _check_same_tokens(model: DirectoryScorer, parent: DirectoryScorer | None) -> None:
    """Raises ConfigError if the models do not share a vocabulary: their distributions are then not comparable."""
    if parent is None:
        return
    if model.vocab_size != parent.vocab_size:
        raise ConfigError(
            f"{model.folder} has a vocabulary of {model.vocab_size}, and {parent.folder} one of {parent.vocab_size}.",
            hint="A model is compared with a parent of the same tokenizer.",
        )
    files = [each.folder / "tokenizer.json" for each in (model, parent)]
    if all(file.is_file() for file in files) and len({tokenizer_digest(file) for file in files}) > 1:
        raise ConfigError(
            f"{model.folder} and {parent.folder} have different tokenizers.",
            hint="A model is compared with a parent of the same tokenizer.",
        )
