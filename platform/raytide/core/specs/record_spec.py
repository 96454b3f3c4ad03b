"""What a run writes down and watches for: MLflow, profiled steps, and losses that are not to be learned from."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from raytide.core.config import Config


class MlflowSpec(Config):
    """A second home for the metrics; `metrics.jsonl` is written with or without it.

    RAYTIDE_MLFLOW_TOKEN, where the operator set it, is the bearer token for the server of RAYTIDE_MLFLOW_URI alone.
    """

    tracking_uri: str = Field(pattern="^https?://")
    """The address of an MLflow server."""
    experiment: str = Field(default="raytide", min_length=1)


class ProfileSpec(Config):
    """torch's profiler over steps `from` to `to`, counted from 1, both included."""

    model_config = ConfigDict(populate_by_name=True)

    first: int = Field(alias="from", ge=1)
    last: int = Field(alias="to", ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> ProfileSpec:
        if self.last < self.first:
            raise ValueError(f"to {self.last} is before from {self.first}")
        return self


class GuardSpec(Config):
    """What to do with a batch whose loss is not a number, or far above the losses before it.

    `skip` leaves weights, optimizer and learning rate as they were and goes on with the next batch.
    """

    nan: Literal["stop", "skip"] = "stop"
    """A loss or a gradient norm that is not finite."""
    spike: Literal["stop", "skip", "ignore"] = "ignore"
    """A loss above median + max(sigmas * deviation, rise) of the latest `window` losses that were learned from."""
    sigmas: float = Field(default=8.0, gt=0)
    """Of the deviation, which is 1.4826 times the median absolute one: a normal distribution's sigma."""
    rise: float = Field(default=0.5, ge=0)
    """Never a spike below this, in nats: a flat curve has hardly any deviation."""
    window: int = Field(default=64, ge=8, le=128)
    """Steps. Nothing is a spike before it is full."""
    max_skips: int = Field(default=5, ge=1)
    """In a row; one more stops the run."""
