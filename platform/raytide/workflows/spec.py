"""The spec of a workflow file: named stages, their dependencies, and the schedule.

`raytide.workflows.graph` checks the references between stages, and that there is no cycle.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.model_version import MetricRule
from raytide.workflows.references import MetricCondition
from raytide.workflows.sweep.spec import SweepSpec, Value

MOST_STAGES = 64
MOST_FLOW_BYTES = 60 << 10
"""The most bytes of a workflow as JSON, because it is passed in one environment variable of its driver."""

StageKind = Literal["data", "train", "compress", "eval", "register", "serve", "script"]
StageName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
SWEPT = frozenset({"train", "script"})
"""The kinds that a sweep can vary."""


class StageSpec(Config):
    """One stage. It starts when the stages that it refers to are done and its conditions hold."""

    kind: StageKind
    spec: dict[str, object]
    """The spec of the stage's kind, in which `${STAGE.OUTPUT}` and `${params.NAME}` are replaced. The flow chooses
    `out`.
    """
    needs: tuple[StageName, ...] = Field(default=(), max_length=MOST_STAGES)
    """Stages that must be done before this one, although it does not refer to them."""
    when: tuple[str, ...] = Field(default=(), max_length=32)
    """Conditions on metrics of earlier stages: `eval.loss < 4.2`, `eval.loss <= 0.98 * old.loss`. If one does not hold,
    this stage and all stages that need it are skipped.
    """
    rule: dict[bounds.Name, MetricRule] = Field(default_factory=dict, max_length=bounds.MOST_LABELS)
    """For `serve`: conditions on the metrics of the new registered version in comparison with the version that the
    endpoint serves.
    """
    sweep: SweepSpec | None = None
    """For `train` and `script`: variants of the stage, whose best result is the stage's result."""
    gang: GangSpec | None = None
    """The nodes: `{cpus: 2}`, `{gpus: "H100:8", nodes: [1, 4]}`. By default the spec's gang, or one CPU."""
    retries: int = Field(default=0, ge=0, le=100)
    """The number of further attempts after failures."""
    backoff_s: bounds.Seconds = 10.0
    """The seconds before the first retry; each further wait is twice as long, at most an hour."""
    cache: bool = True
    """True if the stage does not run again once it has finished with the same spec, inputs and code."""
    code: tuple[str, ...] = Field(default=("*",), min_length=1, max_length=64)
    """For `script`: patterns of files in the working directory. The stage runs again if one of these files changes."""
    priority: bounds.Name = "normal"
    budget_usd: bounds.Dollars | None = None
    """The most dollars that its job may cost; in a sweep, the most for each trial."""

    @field_validator("when", mode="before")
    @classmethod
    def _one_condition(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("when")
    @classmethod
    def _are_conditions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            MetricCondition.parse(text)
        return value

    @model_validator(mode="after")
    def _fits_its_kind(self) -> StageSpec:
        if "out" in self.spec:
            raise ValueError("spec.out is chosen by the flow: refer to it as ${STAGE.out}")
        if self.sweep is not None and self.kind not in SWEPT:
            raise ValueError(f"stages of kind {self.kind} have no sweep; {' and '.join(sorted(SWEPT))} stages have")
        if self.rule and self.kind != "serve":
            raise ValueError(f"rule belongs to serve stages, not to {self.kind}: use `when`")
        if (
            self.sweep is not None
            and self.sweep.asha is not None
            and self.kind == "script"
            and "steps" not in self.spec
        ):
            raise ValueError("asha needs the steps of a whole trial: give `steps` in the spec")
        return self

    @property
    def conditions(self) -> tuple[MetricCondition, ...]:
        return tuple(MetricCondition.parse(text) for text in self.when)

    def retry_after_s(self, failures: int) -> float:
        """Returns the time in seconds to wait before the retry that follows this many failures."""
        return min(3600.0, self.backoff_s * 2.0 ** min(failures - 1, 20))


class ScheduleSpec(Config):
    """The conditions under which a workflow runs again: at scheduled times, or after a change of its input data. The
    workflow repeats until it is stopped.
    """

    cron: Annotated[str, Field(max_length=200)] = ""
    """A cron expression of five fields (minute, hour, day, month, weekday) in UTC: `0 3 * * *`."""
    new_data_every_s: bounds.Seconds | None = Field(default=None, ge=1.0)
    """The seconds between two checks of the data stages' inputs; the workflow runs when the inputs have changed."""
    at_once: bool = True
    """True to run the workflow also when it is submitted; False to wait for the first scheduled time."""

    @model_validator(mode="after")
    def _says_when(self) -> ScheduleSpec:
        if not self.cron and self.new_data_every_s is None:
            raise ValueError("give cron or new_data_every_s")
        return self

    @field_validator("cron")
    @classmethod
    def _is_cron(cls, value: str) -> str:
        if value:
            from cronsim import CronSim, CronSimError

            try:
                CronSim(value, datetime.fromtimestamp(0, UTC))
            except CronSimError as error:
                raise ValueError(f"{value!r} is no cron expression: {error}") from None
        return value


class FlowSpec(Config):
    """A workflow. `raytide flow run FILE` reads it from a file in this format."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,39}$")]
    out: bounds.Location = Field(min_length=1)
    """A folder that every node can access, or its URL, for results and the state from which a flow continues.

    Results are stored under the digest of all their inputs, and are also found by other runs of the flow.
    """
    team: bounds.Name | None = None
    """The team of all jobs; by default the token's own team."""
    params: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w{0,63}$")], Value] = Field(
        default_factory=dict, max_length=100
    )
    """Values for `${params.NAME}`, which `--set NAME=VALUE` replaces."""
    stages: dict[StageName, StageSpec] = Field(min_length=1, max_length=MOST_STAGES)
    schedule: ScheduleSpec | None = None
    at_once: int = Field(default=16, ge=1, le=bounds.LIVE_JOBS)
    """The most stages that run at the same time."""
    driver: GangSpec = GangSpec(shapes=(Shape(resources={"CPU": 0.1}),))
    """The resources of the flow's own driver, which is also a job."""

    @model_validator(mode="after")
    def _fits(self) -> FlowSpec:
        size = len(self.model_dump_json(exclude_defaults=True))
        if size > MOST_FLOW_BYTES:
            raise ValueError(f"the flow has {size:,} bytes; {MOST_FLOW_BYTES:,} are allowed")
        return self
