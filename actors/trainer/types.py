"""Types that the whole trainer shares: step results, run results, rank assignments and worker status. This module
imports neither torch nor ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Literal

from raytide.core.errors import RaytideError, TrainError
from raytide.core.io.html import ShownAsHtml

MOST_NATS = 700.0
"""The largest loss whose perplexity is a finite number."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one training step of the whole gang."""

    step: int
    """Step number, counted from 1. After this step, `step` steps are done."""
    loss: float
    """Mean over the valid tokens of the global batch, before the update."""
    lr: float
    grad_norm: float
    """The norm of the gradient before clipping."""
    tokens: int
    step_s: float
    data_s: float
    """Time spent waiting for the batch."""
    world: int
    mfu: float | None = None
    """Model FLOPs utilisation; None where the device's peak is not known."""
    memory_bytes: int = 0
    """Peak memory of the reporting rank so far: of its GPU since the gang formed, or of the process on a CPU."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, including the stall of a checkpoint before this step."""
    verdict: Literal["applied", "skipped", "stopped"] = "applied"
    """skipped: the samples are used up, but the update is not applied. stopped: the run ends here."""
    why: str = ""
    samples: tuple[int, ...] = ()
    """Sample ids of the whole batch, if it was not applied."""
    micro_batch: int = 0
    """The number of sequences in a rank's microbatch."""
    unsaved: str = ""
    """Reason why the last checkpoint could not be written; empty once a later one succeeds."""
    eval_loss: float | None = None
    """Mean loss of the held-out tokens after this step, where the step is followed by an evaluation."""

    forward_s: float = 0.0
    """Seconds of the reporting rank's own forward passes, without waiting for other ranks; 0 if they are not timed."""
    gpu_bytes: int = 0
    """Peak memory of the reporting rank's GPU since the gang formed; 0 on a CPU."""
    early_end: str = ""
    """Reason why the run ends after this step, before its last one."""

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of the whole gang. The time of checkpoints is not counted."""
        return self.tokens / self.step_s if self.step_s > 0 else 0.0

    def metrics_line(self) -> dict[str, Any]:
        """Returns the step's line for metrics.jsonl as a dict."""
        line = {**asdict(self), "tokens_per_s": round(self.tokens_per_s, 1)}
        for key in ("samples", "verdict", "why") if self.verdict == "applied" else ("samples",):
            del line[key]  # recorded in an event
        for key in ("unsaved", "early_end", "forward_s", "gpu_bytes"):  # recorded in events, or of one rank
            del line[key]
        if self.eval_loss is None:
            del line["eval_loss"]
        else:
            line["eval_perplexity"] = math.exp(min(self.eval_loss, MOST_NATS))
        return line


def scalar_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers in a metrics line as a flat dict, for plots over steps in MLflow and Ray Train."""
    flat = {f"times/{phase}": float(seconds) for phase, seconds in line["times"].items()}
    names = [name for name, value in line.items() if isinstance(value, int | float) and name not in ("step", "at_s")]
    return {name: float(line[name]) for name in names} | flat


@dataclass(frozen=True, slots=True)
class RunResult(ShownAsHtml):
    """The result of a run."""

    steps: int
    first_loss: float | None
    """Loss of the run's first step, also after a resume. None, like `loss`, if no step was done."""
    loss: float | None
    tokens: int
    """Tokens trained on by this call; repeated steps count each time."""
    seconds: float
    restarts: int
    """Number of times the gang failed and formed again."""
    resizes: int
    """Number of planned re-formations, which lose no state."""
    steps_lost: int
    """Steps repeated because no snapshot or checkpoint had them."""
    recovery_s: float
    """Longest time in seconds from the first sign of a failure or a planned change to the next completed step."""
    model_dir: str | None


class StopRequest(IntEnum):
    """A request to stop a generation before its next step: NO, STOP or SAVE. The driver sends it to rank 0 only. The
    other ranks learn it in the step's all-reduce, which adds up the values of all ranks.
    """

    NO = 0
    STOP = 1  # keep the state in memory only: the notice is too short for a checkpoint
    SAVE = 2  # also write a checkpoint


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A rank's assignment in one generation of the gang."""

    generation: int
    rank: int
    world: int
    store: tuple[str, int]
    """Host and port of the rendezvous store, which rank 0 has already opened."""
    address: str
    micro_batch: int
    """Microbatch of the spec, or a smaller one after running out of memory."""
    claim: str = ""
    """Token of the run's claim on its folders; without it no checkpoint is committed."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The status of a rank: its steps since the last poll, and its current phase."""

    generation: int
    phase: str
    phase_s: float
    stack: str = ""
    """Innermost stack frames of the training thread, innermost first."""
    is_waiting: bool = False
    """True while the rank waits for other ranks."""
    steps: list[StepResult] = field(default_factory=list)
    skipped_checkpoints: list[str] = field(default_factory=list)
    """Checkpoints rejected while loading."""
    phase_times: dict[str, float] = field(default_factory=dict)
    """Seconds of this generation's join, build, load, first_step and leave phases, as far as they are over."""
    source: str = ""
    """Origin of the state: "memory", "storage", or empty for a fresh start."""
    save_s: float = 0.0
    """Duration of the last successful checkpoint in seconds; 0 before the first."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The result of one rank in one generation."""

    kind: Literal["done", "paused", "broken", "oom", "failed"]
    """broken: a collective failed, so a peer is gone. failed: the run itself cannot continue."""
    detail: str = ""
    error: RaytideError | None = None
    timed_out: bool = False
    """True if a broken collective timed out, False if the peer closed its connection."""
    last_status: WorkerStatus | None = None


GROW_AFTER = 200
"""The number of steps after which a halved microbatch is doubled again."""
PATIENCE = 4
"""The factor by which each further failure extends the wait before the next doubling."""


class MicroBatchLimit:
    """The limit on the microbatch's size. The limit is halved each time memory runs out, and raised again later."""

    def __init__(self, name: str) -> None:
        self.size: int | None = None
        """The limit in sequences; None without a limit."""
        self._name = name
        self._ranks = 0
        self._steps_left, self._wait = 0, GROW_AFTER

    def bound(self, wanted: int) -> int:
        return wanted if self.size is None else min(wanted, self.size)

    def halve(self, size: int, ranks: int) -> int:
        """Sets the limit to half of `size`, rounded up, and returns the new limit. Call it when memory ran out with
        `size` sequences. The global batch stays the same. Raises TrainError if `size` is 1.
        """
        if size == 1:
            raise TrainError(
                f"{self._name} runs out of memory even with a microbatch of one sequence.",
                hint="Use memory.checkpointing, memory.loss_chunk or memory.activations, shard the model over more "
                "ranks (layout), or lower seq_len.",
            )
        self.size, self._ranks = -(-size // 2), ranks
        self._steps_left, self._wait = self._wait, self._wait * PATIENCE
        return self.size

    def record_steps(self, steps: int) -> None:
        """Records `steps` steps in which memory did not run out."""
        self._steps_left -= steps

    def grow(self, wanted: int, ranks: int) -> bool:
        """Raises the limit after enough steps, or for a larger gang. Returns whether the microbatch is larger now."""
        before = self.bound(wanted)
        if self.size is not None and ranks > self._ranks:
            self.size, self._wait = None, GROW_AFTER
        elif self.size is not None and self._steps_left <= 0:
            self.size = 2 * self.size if 2 * self.size < wanted else None
            self._steps_left = self._wait
        return self.bound(wanted) > before
