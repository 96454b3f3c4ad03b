"""The trainer's nouns: what a step did, how a run ended, a rank's seat and its outcome. No torch, no ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raytide.core.errors import RaytideError


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, over all ranks."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the valid tokens of the global batch, before the update."""
    lr: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    step_s: float
    data_s: float
    world: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended."""

    steps: int
    first_loss: float | None
    """Of the run's first step, also after a resume; None, like `loss`, when no step was done."""
    loss: float | None
    tokens: int
    """Trained on by this call, steps done twice counted twice."""
    seconds: float
    restarts: int
    """How often the gang broke and formed again."""
    resizes: int
    """How often it formed again on purpose, from a checkpoint of that moment."""
    recovery_s: float
    """The longest time from the first sign of a break to the next step done."""
    model_dir: str | None


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in one generation of the gang."""

    generation: int
    rank: int
    world: int
    store: tuple[str, int]
    """Host and port of the store where the ranks meet; rank 0 has it open already."""
    address: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended for one rank."""

    kind: Literal["done", "paused", "broken", "failed"]
    """broken: a collective failed, so some peer is gone. failed: the run itself cannot go on."""
    detail: str = ""
    error: RaytideError | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank is at: steps since the last look, and where it stands now."""

    generation: int
    phase: str
    phase_s: float
    steps: list[StepResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Checkpoints that had to be passed over."""
