"""Runs tasks of lm-evaluation-harness on a model directory. The native engine's forward pass computes the model's
predictions.

The package lm_eval is optional. If it is not installed, a suite with tasks raises an error that names the package.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytide.actors.quality.corpus import Window
from raytide.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from raytide.actors.engine.text.tokenizer import Tokenizer
    from raytide.actors.quality.scorers import DirectoryScorer
    from raytide.actors.quality.suite import TaskSuite

_PREFERRED = ("acc_norm", "acc", "exact_match")


@dataclass(frozen=True, slots=True)
class TaskQuality:
    """The results of one task. `flips` is the share of samples that only one of the two, model or parent, answers
    correctly. Flips in opposite directions would cancel out in the accuracy. It is None for a task that grades its
    samples between right and wrong, such as TruthfulQA's MC2.
    """

    samples: int
    accuracy: float | None = None
    parent_accuracy: float | None = None
    flips: float | None = None
    bits_per_byte: float | None = None
    parent_bits_per_byte: float | None = None


def run_tasks(
    suite: TaskSuite, model: DirectoryScorer, parent: DirectoryScorer | None, window: int
) -> dict[str, TaskQuality]:
    """Runs the tasks on the model and, if there is one, on its parent. Raises ConfigError if lm_eval is not
    installed.
    """
    own = _run(suite, model, window)
    before = None if parent is None else _run(suite, parent, window)
    return {name: _result(found, None if before is None else before[name]) for name, found in own.items()}


@dataclass(frozen=True, slots=True)
class _TaskRun:
    right: list[float] | None
    """1.0 for each sample that is answered correctly, in the samples' order; None for a task of likelihoods. Some
    tasks have grades from 0 to 1.
    """
    bits_per_byte: float | None
    samples: int


def _result(own: _TaskRun, before: _TaskRun | None) -> TaskQuality:
    flips = None
    if before is not None and own.right and before.right and {*own.right, *before.right} <= {0.0, 1.0}:
        flips = sum(a != b for a, b in zip(own.right, before.right, strict=True)) / len(own.right)
    return TaskQuality(
        samples=own.samples,
        accuracy=_mean(own.right),
        parent_accuracy=None if before is None else _mean(before.right),
        flips=flips,
        bits_per_byte=own.bits_per_byte,
        parent_bits_per_byte=None if before is None else before.bits_per_byte,
    )


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _run(suite: TaskSuite, scorer: DirectoryScorer, window: int) -> dict[str, _TaskRun]:
    # Both are read when the packages are imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"tasks need lm-evaluation-harness, which cannot be imported: {error}.",
            hint="Install it with `pip install lm_eval`, or leave tasks out of the suite.",
        ) from None
    try:
        found = lm_eval.simple_evaluate(
            model=_language_model(scorer, window),
            tasks=list(suite.names),
            task_manager=TaskManager(include_path=suite.folder or None),
            limit=suite.limit,
            log_samples=True,
            bootstrap_iters=0,
            verbosity="ERROR",
        )
    except (KeyError, ValueError, OSError, ConnectionError) as error:
        raise DataError(
            f"the tasks {', '.join(suite.names)} cannot be run: {error}.",
            hint="Tasks must be installed or lie in tasks.folder, with data that needs no hub.",
        ) from None
    return {name: _task_run(rows, found["results"].get(name, {})) for name, rows in found["samples"].items()}


def _task_run(rows: Iterable[Mapping[str, Any]], results: Mapping[str, Any]) -> _TaskRun:
    ordered = sorted(rows, key=lambda row: int(row["doc_id"]))
    metric = next((name for name in _PREFERRED if ordered and name in ordered[0]), None)
    right = None if metric is None else [float(row[metric]) for row in ordered]
    bits = results.get("bits_per_byte,none")
    return _TaskRun(right, None if bits is None else float(bits), len(ordered))


def _language_model(scorer: DirectoryScorer, window: int) -> Any:
    """Returns the scorer as a model of lm_eval. The class is made here, because its base class exists only where
    lm_eval is installed.
    """
    from lm_eval.api.model import LM

    tokenizer = scorer.tokenizer()
    if tokenizer is None:
        raise DataError(f"{scorer.folder} has no tokenizer.json, which tasks need.", hint="Put it beside the weights.")
    likelihoods = _Likelihoods(scorer, tokenizer, window)

    class LocalModel(LM):  # type: ignore[misc, unused-ignore]
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [likelihoods.continuation(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [likelihoods.text(request.args[0]) for request in requests]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            raise ConfigError(
                "tasks that generate text are not run on a directory.",
                hint="Serve the model and run lm_eval's local-completions.",
            )

    return LocalModel()


class _Likelihoods:
    def __init__(self, scorer: DirectoryScorer, tokenizer: Tokenizer, window: int) -> None:
        self._scorer, self._tokenizer, self._window = scorer, tokenizer, window
        self._start = tokenizer.encode("")
        first = tokenizer.first_token
        self._alone = self._start if self._start or first is None else [first]

    def continuation(self, context: str, answer: str) -> tuple[float, bool]:
        """Returns the log likelihood of the answer's tokens, and whether every one of them is the most likely token.

        A context that is too long loses its beginning. Without a context, the answer follows the BOS or EOS token.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:  # tokens begin with the space, so it belongs to the answer
            context, answer = context[:-spaces], context[-spaces:] + answer
        start = self._start if context else self._alone
        both = start + self._encode(context + answer)
        given = max(1, len(start) + len(self._encode(context)))
        window = Window(both[-self._window :], max(1, given - max(0, len(both) - self._window)))
        logits_TV = self._scorer.logits(window)
        targets_T = logits_TV.new_tensor(window.targets).long()
        likelihood = logits_TV.log_softmax(-1).gather(1, targets_T[:, None]).sum()
        return float(likelihood), bool((logits_TV.argmax(-1) == targets_T).all())

    def text(self, text: str) -> float:
        """Returns the log likelihood of a text, which is scored window by window."""
        tokens, size = self._encode(text), self._window - max(1, len(self._start))
        total, before = 0.0, self._start or tokens[:1]
        tokens = tokens if self._start else tokens[1:]
        for at in range(0, len(tokens), size):
            total -= float(self._scorer.nll(Window(before + tokens[at : at + size], len(before))).sum())
            before = self._start or tokens[at + size - 1 : at + size]
        return total

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_all([text], plain=True)[0]
