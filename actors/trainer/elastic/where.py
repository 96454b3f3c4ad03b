"""Where in the code a thread is: its innermost frames, and whether it waits there for other ranks."""

from __future__ import annotations

import sys
import threading
from types import FrameType

INNERMOST = 4
OURS = 3
"""Of raytide's own frames, so many are named even when they are further out."""
_RAYTIDE = ("/actors/trainer/", "/actors/models/")
_THROUGH = ("/torch/_ops.py", "/torch/utils/_contextlib.py", "/torch/distributed/c10d_logger.py")
_LOCKS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")
READERS = "data"
"""How the names of threads begin that read for the one that works."""


def stack_summary(thread_id: int) -> tuple[str, bool]:
    """The frames of a thread, the innermost first, and whether it waits for other ranks in them.

    A thread that waits for another one to read is shown with that one's frames behind its own.
    """
    frames = _frames(thread_id)
    shown = _show(frames)
    if frames and _file(frames[0]).endswith(_LOCKS):
        for reader in threading.enumerate():
            if reader.name.startswith(READERS) and (there := _frames(reader.ident or 0)):
                shown += f"; thread {reader.name}: {_show(there)}"
    return shown, _waits(frames)


def _frames(thread_id: int) -> list[FrameType]:
    """No name for all threads' frames: this one's would then hold itself, and with it every local variable of the run
    until the next collection, the groups that a broken generation leaves too."""
    innermost, found = sys._current_frames().get(thread_id), []
    while innermost is not None:
        found.append(innermost)
        innermost = innermost.f_back
    return found


def _show(frames: list[FrameType]) -> str:
    ours = [frame for frame in frames if any(part in _file(frame) for part in _RAYTIDE)][:OURS]
    shown = frames[:INNERMOST] + [frame for frame in ours if frame not in frames[:INNERMOST]]
    return " < ".join(f"{_short(frame)}:{frame.f_lineno} in {frame.f_code.co_name}" for frame in shown)


def _waits(frames: list[FrameType]) -> bool:
    """In a collective of torch's, or where ours read a collective's result from the device."""
    at = next((_file(frame) for frame in frames if not _file(frame).endswith(_THROUGH)), "")
    in_torch = "/torch/distributed/" in at and "/torch/distributed/checkpoint/" not in at
    return in_torch or at.endswith("/actors/trainer/distributed/process_group.py")


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _short(frame: FrameType) -> str:
    return "/".join(_file(frame).rsplit("/", 2)[-2:])
