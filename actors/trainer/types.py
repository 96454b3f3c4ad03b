"""The trainer's nouns: what a step did, how a run ended, a rank's seat and its outcome. No torch, no ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Literal

from raytide.core.errors import RaytideError, TrainError


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, over all ranks."""

    step: int
    """Its number, counted from 1; when it was applied or skipped, so many are done."""
    loss: float
    """Mean over the valid tokens of the global batch, before the update."""
    lr: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    step_s: float
    data_s: float
    """Waiting for the batch."""
    world: int
    mfu: float | None = None
    """Model FLOPs utilisation; None where the device's peak is not known."""
    memory_bytes: int = 0
    """The most that the reporting rank had so far: of its GPU, else of the process."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, the stall of a checkpoint before this step among them."""
    verdict: Literal["applied", "skipped", "stopped"] = "applied"
    """skipped: its samples are used up and nothing was learned. stopped: neither, and the run ends."""
    why: str = ""
    samples: tuple[int, ...] = ()
    """The ids of the whole batch, when it was not applied."""
    micro_batch: int = 0
    """Sequences that a rank had at once."""
    unsaved: str = ""
    """Why the last checkpoint could not be written, until a later one could."""

    @property
    def tokens_per_s(self) -> float:
        """Of the whole gang, checkpoints left out."""
        return self.tokens / self.step_s if self.step_s > 0 else 0.0

    def metrics_line(self) -> dict[str, Any]:
        """As metrics.jsonl has it."""
        line = {**asdict(self), "tokens_per_s": round(self.tokens_per_s, 1)}
        for key in ("samples", "verdict", "why") if self.verdict == "applied" else ("samples",):
            del line[key]  # an event has the samples
        del line["unsaved"]  # as an event has this
        return line


def scalar_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """What of a step's line can be drawn over its steps, flat: for MLflow and Ray Train."""
    flat = {f"times/{phase}": float(seconds) for phase, seconds in line["times"].items()}
    names = [name for name, value in line.items() if isinstance(value, int | float) and name not in ("step", "at_s")]
    return {name: float(line[name]) for name in names} | flat


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
    """How often it formed again on purpose, from the state of that moment."""
    steps_lost: int
    """Done again, because no snapshot and no checkpoint of them was left."""
    recovery_s: float
    """The longest time from the first sign of a break to the next step done."""
    model_dir: str | None


class StopRequest(IntEnum):
    """Whether a generation shall stop before its next step. The ranks add their answers up: the largest wins."""

    NO = 0
    STOP = 1  # with the state in memory only: a checkpoint would not fit into the notice
    SAVE = 2  # with a checkpoint besides


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A rank's place in one generation of the gang."""

    generation: int
    rank: int
    world: int
    store: tuple[str, int]
    """Host and port of the store where the ranks meet; rank 0 has it open already."""
    address: str
    micro_batch: int
    """The spec's, or less once it did not fit."""
    claim: str = ""
    """The token of the run's claim on its folders, without which no checkpoint is sealed."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a rank is at: steps since the last look, and where it stands now."""

    generation: int
    phase: str
    phase_s: float
    stack: str = ""
    """The innermost frames of its work, the innermost first."""
    is_waiting: bool = False
    """Whether it waits there for other ranks."""
    steps: list[StepResult] = field(default_factory=list)
    skipped_checkpoints: list[str] = field(default_factory=list)
    """Checkpoints that had to be passed over."""
    phase_times: dict[str, float] = field(default_factory=dict)
    """Seconds of this generation's join, build, load, first_step and leave, as far as they are over."""
    source: str = ""
    """Where its state came from: "memory", "storage", or nothing for the first step of all."""
    save_s: float = 0.0
    """Of the last checkpoint, from the state to its seal; 0 before the first."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a generation ended for one rank."""

    kind: Literal["done", "paused", "broken", "oom", "failed"]
    """broken: a collective failed, so some peer is gone. failed: the run itself cannot go on."""
    detail: str = ""
    error: RaytideError | None = None
    timed_out: bool = False
    """broken, since a peer kept it waiting rather than closed its door."""
    last_status: WorkerStatus | None = None


def halve_micro_batch(micro_batch: int, name: str) -> int:
    """Returns half the microbatch, rounded up: the same global batch in half the memory. TrainError when it is 1."""
    if micro_batch == 1:
        raise TrainError(
            f"{name} does not fit into memory with one sequence at a time.",
            hint="Use memory.checkpointing, memory.loss_chunk or memory.activations, divide the model among more ranks "
            "(layout), or lower seq_len.",
        )
    return -(-micro_batch // 2)
