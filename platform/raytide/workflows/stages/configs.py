"""The specs that only stages use (script, eval and register), and the check of a whole flow before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from raytide.actors.quality.suite import QualitySuite
from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.errors import ConfigError
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.specs.data import DataSpec
from raytide.core.specs.model_version import ModelName
from raytide.core.specs.script import ScriptSpec
from raytide.core.specs.train import TrainSpec
from raytide.pipelines.compress.recipe import CompressRecipe
from raytide.workflows.graph import order_of
from raytide.workflows.references import METRICS, PARAMS, Reference, resolved, with_value
from raytide.workflows.spec import FlowSpec, StageSpec
from raytide.workflows.sweep.spec import Value


class ScriptStageSpec(Config):
    """A command that runs on every member of a gang, in a copy of the flow's working directory. It is started in the
    same way as by `raytide run`.

    RAYTIDE_STAGE_OUT is the folder for the command's results. The stage's metrics are the numbers that the job reports,
    and the numbers in a file `metrics.json` that the command writes to this folder.
    """

    command: tuple[str, ...] = Field(min_length=1)
    params: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$")], Value] = Field(
        default_factory=dict, max_length=bounds.MOST_LABELS
    )
    """Arguments that follow the command, as `--NAME=VALUE`."""
    env: dict[str, str] = Field(default_factory=dict, max_length=1000)
    nproc_per_node: Annotated[int, Field(ge=1, le=1024)] = 1
    steps: int | None = Field(default=None, ge=1)
    """The value of `step` that the command reports at its end, from which the rungs of a sweep are computed."""

    @field_validator("command", "env", mode="before")
    @classmethod
    def _as_texts(cls, value: object) -> object:
        """Returns the values with numbers written as text, because references to metrics are replaced by numbers."""
        if isinstance(value, Mapping):
            return {key: _text(each) for key, each in value.items()}
        return [_text(each) for each in value] if isinstance(value, list | tuple) else value

    def script(self, out: str, package: str) -> ScriptSpec:
        """Returns the spec of the script job that runs the command."""
        given = (f"--{name}={value}" for name, value in self.params.items())
        fields = {
            "command": (*self.command, *given),
            "env": {**self.env, "RAYTIDE_STAGE_OUT": out},
            "nproc_per_node": self.nproc_per_node,
            "package": package,
        }
        return ScriptSpec.parse(fields, where="script")


class EvalSpec(Config):
    """The evaluation of a model. It consists of one or more of these measurements: the loss on a held-out dataset, the
    accuracy of answers to prompts, and a suite that compares the model with its parent.

    The metrics of a dataset are `loss` (nats a token), `perplexity` and `tokens`. The metrics of prompts are
    `accuracy` and `prompts`. A suite has its own metrics, such as `kl`. If the suite's gate is not passed, the stage
    fails.
    """

    model: bounds.Location = ""
    """A Hugging Face directory, or the `out` of a run that exported one."""
    dataset: bounds.Location = ""
    """A token dataset made with the model's tokenizer."""
    seq_len: int = Field(default=256, ge=2, le=1 << 20)
    """The length of the sequences in tokens; every token after a sequence's first is predicted."""
    batch: int = Field(default=8, ge=1, le=4096)
    max_sequences: int | None = Field(default=None, ge=1)
    """The most sequences to read, from the beginning; None for all."""
    endpoint: bounds.Location = ""
    """An endpoint by its base URL, such as `${serve.url}`."""
    endpoint_model: bounds.Word = ""
    """The model's name at the endpoint, such as `${serve.name}`."""
    api_key_file: bounds.Location = ""
    """A file with the API key for the endpoint, if it demands one. Specs hold no keys, because others can read them."""
    prompts: bounds.Location = ""
    """A JSONL file of `{"prompt": ..., "expect": ...}`. The answer must contain the expected text, or match the pattern
    in `{"matches": ...}`.
    """
    max_tokens: int = Field(default=64, ge=1, le=1 << 16)
    suite: QualitySuite | None = None
    """The suite, as for `raytide eval`."""

    @model_validator(mode="after")
    def _has_work(self) -> EvalSpec:
        if not self.dataset and not self.prompts and self.suite is None:
            raise ValueError("give dataset, prompts or suite")
        if self.suite is not None and not self.model:
            raise ValueError("a suite needs model, a directory")
        if self.dataset and not self.model:
            raise ValueError("the loss on a dataset needs model, a directory")
        if self.prompts and not (self.endpoint and self.endpoint_model):
            raise ValueError("prompts need endpoint and endpoint_model: the address and the name that answer them")
        return self


class RegisterSpec(Config):
    """The registration of a model directory as a new version of a registered model, with the results of evaluations."""

    name: ModelName
    model: bounds.Location = Field(min_length=1)
    job: bounds.Word = ""
    """The job that made the model, such as `${train.job}`, for its lineage."""
    metrics: dict[bounds.Name, float] = Field(default_factory=dict, max_length=bounds.MOST_LABELS)
    """Results of evaluations, such as `eval_loss: ${eval.metrics.loss}`, which `raytide model promote --rule` also
    compares.
    """
    note: bounds.Word = ""


def _text(value: object) -> object:
    return f"{value}" if isinstance(value, int | float) and not isinstance(value, bool) else value


_SPECS: dict[str, type[Config]] = {
    "eval": EvalSpec,
    "register": RegisterSpec,
    "script": ScriptStageSpec,
    "serve": ServeSpec,
}
_EXAMPLES = {"version": "1", "reference": "registry:model:1", "name": "name", "url": "http://127.0.0.1/v1"}


def data_spec(spec: dict[str, object], name: str, out: str, stage: StageSpec) -> DataSpec:
    fields = {"name": name, **spec, "out": out}
    parsed = DataSpec.parse(fields, where=name)
    return parsed if stage.gang is None else DataSpec.parse({**fields, "gang": stage.gang.model_dump()}, where=name)


def train_spec(spec: dict[str, object], name: str, out: str, stage: StageSpec) -> TrainSpec:
    parsed = TrainSpec.parse({"name": name, **spec, "out": out}, where=name)
    return parsed if stage.gang is None else parsed.model_copy(update={"gang": stage.gang})


def compress_recipe(spec: dict[str, object], name: str, out: str) -> CompressRecipe:
    return CompressRecipe.parse({"name": name, **spec, "out": out}, where=name)


def check(flow: FlowSpec) -> None:
    """Checks everything about a flow that can be checked before it runs. Raises ConfigError, which names the stage.

    For the check, references are replaced by example values: a path for an output, 1.0 for a metric.
    """

    def example(reference: Reference) -> object:
        if reference.stage == PARAMS:
            return flow.params[reference.name]
        if reference.name.startswith(f"{METRICS}."):
            return 1.0
        return _EXAMPLES.get(reference.name, f"{flow.out}/{reference.stage}")

    for name in order_of(flow):
        stage = flow.stages[name]
        spec = resolved(stage.spec, example)
        assert isinstance(spec, dict)  # as the stage's spec is
        for path, values in (stage.sweep.space if stage.sweep is not None else {}).items():
            spec = with_value(spec, path, values.example)
        where = f"{flow.name}-{name}"
        if stage.kind == "data":
            data_spec(spec, where, flow.out, stage)
        elif stage.kind == "train":
            _check_training(train_spec(spec, where, flow.out, stage), stage, where)
        elif stage.kind == "compress":
            compress_recipe(spec, where, flow.out)
        else:
            parsed = _SPECS[stage.kind].parse(spec, where=f"stage {name}")
            if isinstance(parsed, ScriptStageSpec) and parsed.steps is not None:
                _check_rungs(parsed.steps, stage, where)


def _check_training(spec: TrainSpec, stage: StageSpec, where: str) -> None:
    if stage.sweep is not None and any(path.partition(".")[0] == "steps" for path in stage.sweep.space):
        raise ConfigError(f"{where}: a sweep cannot vary steps.", hint="Its trials are compared at equal steps.")
    _check_rungs(spec.steps, stage, where)


def _check_rungs(steps: int, stage: StageSpec, where: str) -> None:
    asha = None if stage.sweep is None else stage.sweep.asha
    if asha is not None and asha.first >= steps:
        raise ConfigError(
            f"{where}: the first rung of asha is at step {asha.first}, and a trial ends at {steps}.",
            hint="Lower `first`.",
        )
