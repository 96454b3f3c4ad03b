"""The `sweep` of a stage: the values to try, the number of trials, and the rule that ends trials early."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from raytide.core import bounds
from raytide.core.config import Config

MOST_TRIALS = 1000
Value = Annotated[str, Field(max_length=1000)] | bool | int | float
ParameterPath = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,7}$")]


class ValueRange(Config):
    """The possible values of one parameter: a list of choices, or a range of numbers."""

    choices: tuple[Value, ...] | None = Field(default=None, min_length=1, max_length=1000)
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    """True to draw numbers evenly by their logarithm, as for learning rates."""

    @model_validator(mode="after")
    def _one_kind(self) -> ValueRange:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log:
                raise ValueError("give either choices, or low and high")
            return self
        if self.low is None or self.high is None:
            raise ValueError("give choices, or low and high")
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic range begins above 0, not at {self.low:g}")
        return self

    @property
    def example(self) -> Value:
        """One of the possible values. It is used to check a spec before any trial runs."""
        if self.choices is not None:
            return self.choices[0]
        assert self.low is not None
        return self.low


class HalvingSpec(Config):
    """Asynchronous successive halving. At each rung, only the best `1 / factor` of the trials that reached the rung
    continue.

    Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", algorithm 2, in the variant that ends
    trials instead of pausing them.
    """

    first: int = Field(ge=1)
    """The step of the first rung. The next ones are at `first * factor`, `first * factor ** 2` and so on."""
    factor: int = Field(default=3, ge=2, le=100)
    least: int = Field(default=1, ge=1)
    """The number of other trials that must have reached a rung before a trial can end there."""


class SweepSpec(Config):
    """Variants of a stage, which run as separate jobs. The results of the stage are those of the best variant."""

    space: dict[ParameterPath, ValueRange] = Field(min_length=1, max_length=bounds.MOST_LABELS)
    """The values by the path of the field in the stage's `spec`: `optim.lr`."""
    metric: bounds.Name = "loss"
    mode: Literal["min", "max"] = "min"
    trials: int = Field(ge=1, le=MOST_TRIALS)
    at_once: int = Field(default=4, ge=1, le=bounds.LIVE_JOBS)
    """The most trials that are queued or run at the same time."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """Optuna's sampler; `tpe` learns from the trials that have ended."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    asha: HalvingSpec | None = None
    """The rule for ending trials early; None runs every trial to its end."""

    @model_validator(mode="after")
    def _grid_has_choices(self) -> SweepSpec:
        open_ended = [name for name, values in self.space.items() if values.choices is None]
        if self.sampler == "grid" and open_ended:
            raise ValueError(f"a grid needs choices for every parameter, and {open_ended[0]} has a range")
        return self

    def rungs(self, steps: int) -> tuple[int, ...]:
        """Returns the rungs, which are the steps at which trials are compared. All are below `steps`, the length of a
        whole trial.
        """
        found: list[int] = []
        step = steps if self.asha is None else self.asha.first
        while step < steps:
            found.append(step)
            step *= 2 if self.asha is None else self.asha.factor
        return tuple(found)
