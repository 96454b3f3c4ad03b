"""The suite of an evaluation: corpora, tasks, the parent to compare with, and the gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.errors import ConfigError
from raytide.core.specs.model_version import MetricRule, PromotionRule

CorpusName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]{0,39}$")]


class HeldOutText(Config):
    """A corpus that no step of training or calibration has read."""

    path: bounds.Location = Field(min_length=1)
    """A text file, or a JSONL file whose lines have a text or a list of token ids."""
    field: str = Field(default="text", min_length=1, max_length=100)
    """The key of a JSONL line that holds the text. A key `tokens` with token ids takes precedence over it."""
    tokens: int = Field(default=8192, ge=2, le=1 << 30)
    """The most tokens that are predicted, from the beginning."""


class TaskSuite(Config):
    """Tasks of lm-evaluation-harness that do not need the Hugging Face Hub: tasks in `folder`, or installed tasks with
    local data.
    """

    names: tuple[bounds.Name, ...] = Field(min_length=1, max_length=64)
    folder: bounds.Location = ""
    """A folder with the tasks' YAML files."""
    limit: int | None = Field(default=None, ge=1)
    """The most samples of each task."""


class QualityGate(Config):
    """The limits that every corpus and task must keep. A limit that is None is not checked."""

    max_kl: float | None = Field(default=None, ge=0)
    """The largest mean divergence KL(parent | model), in nats a token."""
    max_kl_p99: float | None = Field(default=None, ge=0)
    min_same_top1: float | None = Field(default=None, ge=0, le=1)
    """The smallest share of positions at which model and parent predict the same token."""
    max_perplexity: float | None = Field(default=None, gt=0)
    max_ppl_change: float | None = None
    """The largest relative change of the perplexity: 0.015 allows 1.5 %."""
    max_flips: float | None = Field(default=None, ge=0, le=1)
    """The largest share of a task's samples that only one of parent and model answers correctly."""
    min_accuracy: float | None = Field(default=None, ge=0, le=1)

    def rule(self) -> PromotionRule:
        """Returns these limits as a PromotionRule, the kind of rule that `raytide model promote` applies. The rule
        refers to the metrics of `QualityReport.metrics`.
        """
        limits: dict[str, tuple[Literal["higher", "lower"], float | None]] = {
            "kl": ("lower", self.max_kl),
            "kl_p99": ("lower", self.max_kl_p99),
            "same_top1": ("higher", self.min_same_top1),
            "perplexity": ("lower", self.max_perplexity),
            "ppl_change": ("lower", self.max_ppl_change),
            "flips": ("lower", self.max_flips),
            "accuracy": ("higher", self.min_accuracy),
        }
        metrics = {
            name: MetricRule(better=better, limit=limit)
            for name, (better, limit) in limits.items()
            if limit is not None
        }
        return PromotionRule(metrics=metrics, online="ignored")


class QualitySuite(Config):
    """The content of SUITE.yaml for `raytide eval MODEL SUITE.yaml`."""

    parent: bounds.Location = ""
    """The directory of the model to compare with: the one before compression. Without it there is only perplexity."""
    corpora: dict[CorpusName, HeldOutText] = Field(default_factory=dict, max_length=16)
    tasks: TaskSuite | None = None
    window: int | None = Field(default=None, ge=2, le=1 << 20)
    """The length, in tokens, of the pieces in which a corpus is read: by default 512, or the model's context length if
    that is shorter. The first token of a piece has no prediction.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype in which both models compute; by default each one's own."""
    quantized_input: Literal["auto", "float", "int8"] = "auto"
    """The inputs of quantised weights, as the engine's option of this name."""
    quantized_head: bool = True
    """True if a quantised model's head is quantised too, as the engine's option of this name."""
    gate: QualityGate = QualityGate()

    @model_validator(mode="after")
    def _has_work(self) -> QualitySuite:
        if not self.corpora and self.tasks is None:
            raise ValueError("give corpora, tasks or both")
        return self


def check_gate(suite: QualitySuite) -> None:
    """Raises ConfigError if the gate limits a metric that the suite does not measure."""
    gate, has_tasks = suite.gate, suite.tasks is not None
    compared = suite.parent and suite.corpora
    for name, limit, is_measured, needs in (
        ("max_kl", gate.max_kl, compared, "parent and corpora"),
        ("max_kl_p99", gate.max_kl_p99, compared, "parent and corpora"),
        ("min_same_top1", gate.min_same_top1, compared, "parent and corpora"),
        ("max_ppl_change", gate.max_ppl_change, compared, "parent and corpora"),
        ("max_perplexity", gate.max_perplexity, suite.corpora, "corpora"),
        ("max_flips", gate.max_flips, suite.parent and has_tasks, "parent and tasks"),
        ("min_accuracy", gate.min_accuracy, has_tasks, "tasks"),
    ):
        if limit is not None and not is_measured:
            raise ConfigError(f"gate.{name} needs {needs}.", hint="Give them in the suite, or leave the limit out.")


def broken_limits(gate: QualityGate, metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Returns a sentence for each limit that the metrics exceed. The result is empty if the metrics pass the gate.

    A metric that is missing, or is not a number, counts as exceeding its limit.
    """
    broken = []
    for name, rule in gate.rule().metrics.items():
        assert rule.limit is not None  # the gate's rules have nothing else
        value = metrics.get(name)
        word = "at most" if rule.better == "lower" else "at least"
        if value is None:
            broken.append(f"{name} was not measured, wanted {word} {rule.limit:g}")
        elif not (value <= rule.limit if rule.better == "lower" else value >= rule.limit):
            broken.append(f"{name} is {value:g}, wanted {word} {rule.limit:g}")
    return tuple(broken)
