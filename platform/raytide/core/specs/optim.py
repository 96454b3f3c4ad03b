"""The specification of the optimizer and its learning rate. Does not import torch, because the CLI reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raytide.core.config import Config

OptimName = Literal["adamw", "adamw8bit", "adafactor", "lamb", "muon"]
Schedule = Literal["cosine", "linear", "constant", "wsd"]


class OuterSpec(Config):
    """Training with replicas that synchronise only every few steps (local SGD; DiLoCo, Douillard et al. 2023). A
    synchronisation is called a meeting.

    Between two meetings, each replica updates its weights with the gradients of its own part of each batch. At a
    meeting, the mean change of the replicas' weights serves as the gradient of one SGD step with Nesterov momentum. All
    replicas continue from the result of that step.
    """

    every: int = Field(default=50, ge=1)
    """The number of steps between two meetings. Checkpoints, snapshots and comparisons of replicas wait for the next
    meeting.
    """
    lr: float = Field(default=0.7, gt=0)
    """The learning rate of the SGD step. With 1 and no momentum, the result is the mean of the replicas' weights."""
    momentum: float = Field(default=0.9, ge=0, lt=1)


class OptimSpec(Config):
    """The optimizer and its learning rate. The rate rises linearly to `lr` during the warm-up, and then follows the
    schedule."""

    name: OptimName = "adamw"
    """adamw8bit keeps both moments in 8 bits; adafactor keeps a row and a column of the second one; lamb is for very
    large batches; muon orthogonalizes the updates of hidden matrices and leaves the rest to AdamW."""
    lr: float = Field(default=3e-4, gt=0)
    schedule: Schedule = "cosine"
    """cosine and linear fall to `lr * min_lr_ratio` at the last step; wsd holds `lr`, then falls linearly to it over
    the last `decay_ratio` of the steps; constant holds `lr`."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: int = Field(default=10, ge=0)
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """The momentum of muon."""
    weight_decay: float = Field(default=0.1, ge=0)
    """The weight decay, which applies to matrices, not to norms and biases."""
    clip: float = Field(default=1.0, gt=0)
    """The largest global gradient norm."""
    outer: OuterSpec | None = None
    """If set, replicas exchange the changes of their weights every few steps, in place of the gradients of each
    step."""
    fused: bool = True
    """True to run AdamW as one fused kernel instead of multi-tensor (foreach) kernels."""

    @model_validator(mode="after")
    def _fused_is_of_adamw(self) -> OptimSpec:
        if not self.fused and self.name != "adamw":
            raise ValueError(f"fused is an option of adamw only, not of {self.name}")
        return self
