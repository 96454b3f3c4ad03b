"""Records a rank's status. The training thread writes the status. Another thread reads it to answer polls."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from raytide.actors.trainer.types import StepResult, WorkerStatus

INNERMOST_FRAMES = 4
RAYTIDE_FRAMES = 3
"""The number of frames of raytide's own code that a summary shows even if they lie further out than the others."""
DATA_THREADS = "data"
"""The prefix of the names of threads that read for the training thread."""
_ACTORS = Path(__file__).parents[2]
_RAYTIDE = (f"{_ACTORS}/trainer/", f"{_ACTORS}/models/")
_WRAPPERS = ("/torch/_ops.py", "/torch/utils/_contextlib.py", "/torch/distributed/c10d_logger.py")
_LOCKS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")


class StatusRecorder:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker = 0
        self._generation = -1
        self._phase, self._since_s, self._lap = "idle", time.monotonic(), ""
        self._laps: dict[str, float] = {}
        self._steps: list[StepResult] = []
        self._skipped: list[str] = []
        self._source, self._save_s = "", 0.0

    def open(self, generation: int) -> None:
        """Starts the record of a generation. The calling thread must be the training thread."""
        with self._lock:
            self._worker, self._generation = threading.get_ident(), generation
            self._laps, self._steps, self._skipped, self._source = {}, [], [], ""

    def enter_phase(self, phase: str, *, lap: str = "") -> None:
        """Records that a phase begins. If `lap` is given, the phase's duration is recorded under that name when the
        phase ends.
        """
        with self._lock:
            now = time.monotonic()
            if self._lap:
                self._laps[self._lap] = now - self._since_s
            self._phase, self._since_s, self._lap = phase, now, lap

    def restored(self, source: str, skipped: Iterable[str]) -> None:
        with self._lock:
            self._source = source
            self._skipped += skipped

    def record_step(self, result: StepResult, save_s: float) -> None:
        self.enter_phase(f"after step {result.step}")
        with self._lock:
            self._steps.append(result)
            self._save_s = save_s

    def read(self) -> WorkerStatus:
        """Returns the current status, with the steps since the last call. Each step is returned once."""
        where, waits = stack_summary(self._worker)
        with self._lock:
            steps, self._steps = self._steps, []
            skipped, self._skipped = self._skipped, []
            return WorkerStatus(
                generation=self._generation,
                phase=self._phase,
                phase_s=time.monotonic() - self._since_s,
                stack=where,
                is_waiting=waits,
                steps=steps,
                skipped_checkpoints=skipped,
                phase_times=dict(self._laps),
                source=self._source,
                save_s=self._save_s,
            )


def stack_summary(thread_id: int) -> tuple[str, bool]:
    """Returns a summary of a thread's stack, innermost frames first, and whether the thread waits for other ranks.

    If the thread waits for another thread that reads data, the summary ends with the frames of the reading thread.
    """
    frames = _frames(thread_id)
    shown = _show(frames)
    if frames and _file(frames[0]).endswith(_LOCKS):
        for reader in threading.enumerate():
            if reader.name.startswith(DATA_THREADS) and (reader_frames := _frames(reader.ident or 0)):
                shown += f"; thread {reader.name}: {_show(reader_frames)}"
    return shown, _waits(frames)


def _frames(thread_id: int) -> list[FrameType]:
    """Returns a thread's frames, innermost first. The dict of all frames must not be a local variable here: this frame
    would then refer to itself, and keep the process groups of a broken generation alive.
    """
    innermost, found = sys._current_frames().get(thread_id), []
    while innermost is not None:
        found.append(innermost)
        innermost = innermost.f_back
    return found


def _show(frames: list[FrameType]) -> str:
    raytide_frames = [frame for frame in frames if _file(frame).startswith(_RAYTIDE)][:RAYTIDE_FRAMES]
    shown = frames[:INNERMOST_FRAMES] + [frame for frame in raytide_frames if frame not in frames[:INNERMOST_FRAMES]]
    return " < ".join(f"{_short(frame)}:{frame.f_lineno} in {frame.f_code.co_name}" for frame in shown)


def _waits(frames: list[FrameType]) -> bool:
    """Returns whether the thread is in a torch collective, or reads a collective's result from the device."""
    if not frames:
        return False
    from raytide.actors.trainer.distributed import process_group  # loaded by then: a rank that works has joined

    at = next((_file(frame) for frame in frames if not _file(frame).endswith(_WRAPPERS)), "")
    in_torch = "/torch/distributed/" in at and "/torch/distributed/checkpoint/" not in at
    return in_torch or at == process_group.__file__


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _short(frame: FrameType) -> str:
    """Returns a frame's file: raytide's own as a path below `actors`, others as the last folder and the name."""
    file = _file(frame)
    return file.removeprefix(f"{_ACTORS}/") if file.startswith(_RAYTIDE) else "/".join(file.rsplit("/", 2)[-2:])
