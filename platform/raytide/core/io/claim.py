"""A claim file, which makes sure that only one writer at a time uses an output folder. The folder is a path or an
fsspec URL.

The claim names its holder and changes with every heartbeat. Another run may take the claim over at once in three
cases: both runs belong to the same job, or the holder's job has ended, or the holder was a process of this machine
and is dead. In all other cases, a run may take the claim over after WATCH_S without a heartbeat. Clocks of different
machines are never compared.

A writer that lost its claim learns this before it commits (`committing`). fsspec has no compare-and-swap for object
stores. Two runs may therefore take over a URL at the same time. Each of them reads the file back to see which run
has won.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from raytide.core.errors import ConflictError, RaytideError
from raytide.core.io.atomic_file import write_json
from raytide.core.io.process import Process
from raytide.core.io.storage import full_disk_is_an_error, is_local, join, named_failures, open_url

_log = logging.getLogger(__name__)

NAME = ".claim.json"
BEAT_S = 5.0
WATCH_S = 3 * BEAT_S
SETTLE_S = 1.0
"""The seconds, at a URL, between writing a claim and reading it back."""
LOCK_TIMEOUT_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """The content of a claim file."""

    holder: str
    """A job's id, or a name for a process without a job."""
    token: str
    """Identifies this claim."""
    epoch: int
    """The number of claims of this folder so far."""
    host: str
    boot: str
    """Identifies the machine's boot and the pid namespace, which give the pid its meaning."""
    pid: int
    started: str
    """The process's start time in kernel ticks, because pids are reused."""
    since_s: float
    beats: int = 0

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s))
        return f"{self.holder} (pid {self.pid} on {self.host}, since {since})"


class Claim:
    """This process's claim on its output folders, held until `release` or until another run takes it over.

    Raises a ConflictError that names the other run if a folder is in use.
    """

    def __init__(
        self,
        places: Sequence[str],
        holder: str = "",
        *,
        is_over: Callable[[str], bool] = lambda holder: False,
        beat_s: float = BEAT_S,
        watch_s: float = WATCH_S,
    ) -> None:
        """`places` are folders or URLs. `is_over(holder)` returns whether another holder's job has ended. Without a
        `holder`, the claim belongs to this process alone.
        """
        self.token = secrets.token_hex(8)
        self.holder = holder or f"a process without a job, {secrets.token_hex(4)}"
        self._is_over, self._beat_s, self._watch_s = is_over, beat_s, watch_s
        self._held: dict[str, ClaimRecord] = {}
        self._made: list[str] = []
        """Folders that this claim created; `release` removes them if they are empty."""
        self._lost: ConflictError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="claim", daemon=True)
        try:
            for place in dict.fromkeys(map(_plain, places)):
                self._held[place] = self._take(place)
        except BaseException:
            self.release()
            raise
        self._thread.start()

    @property
    def epoch(self) -> int:
        return max(held.epoch for held in self._held.values())

    def check(self) -> None:
        """Raises ConflictError if a heartbeat found that another run has taken over one of the folders."""
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Frees the folders for the next run. Folders that another run has taken over stay claimed."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(self._beat_s)
        for place in self._held:
            with suppress(RaytideError, OSError), _locked(place):
                held = read_claim(place)
                if held is not None and held.token == self.token:
                    _remove(place)
        for place in self._made:
            with suppress(OSError):
                os.rmdir(place)

    def _take(self, place: str) -> ClaimRecord:
        deadline_s = time.monotonic() + self._watch_s
        if is_local(place) and not Path(place).exists():
            self._made.append(place)
        seen = (read_claim(place), _beat_of(place))
        free_token: str | None = None
        if seen[0] is not None and self._may_take(place, seen[0]):
            free_token = seen[0].token  # whether it still beats does not matter
        while True:
            with _locked(place):
                found, beat = read_claim(place), _beat_of(place)
                is_same = (found, beat) == seen
                if found is None or found.token == free_token or (is_same and time.monotonic() >= deadline_s):
                    claim = _own(self.holder, self.token, 1 + (found.epoch if found is not None else 0))
                    _write(place, claim)
                    break
            if not is_same:  # the holder is alive
                raise _taken(place, found)
            time.sleep(min(_POLL_S * 4, self._beat_s))
        if not is_local(place):
            self._settle(place, claim, free_token)
        return claim

    def _settle(self, place: str, claim: ClaimRecord, free_token: str | None) -> None:
        """Raises ConflictError if another claim stands at a URL after a while.

        A holder that was replaced may write a heartbeat once more, over this claim, because it read its own before.
        """
        for is_last in (False, True):
            time.sleep(SETTLE_S)
            last = read_claim(place)
            if last is None or last.token == self.token:
                return
            if is_last or last.token != free_token:
                raise _taken(place, last)
            _write(place, claim)

    def _may_take(self, place: str, found: ClaimRecord) -> bool:
        """Returns whether the holder has ended, so that its claim may be taken over.

        If this is not known, missing heartbeats over the next WATCH_S show it. Raises ConflictError if the holder is
        alive.
        """
        if found.holder == self.holder or self._is_over(found.holder):
            return True
        if found.boot != _boot() or (alive := _is_alive(found)) is None:
            return False
        if alive:
            raise _taken(place, found)
        return True

    def _keep(self) -> None:
        while not self._over.wait(self._beat_s):
            for place in list(self._held):
                try:
                    self._beat(place)
                except ConflictError as error:
                    self._lost = error
                    return
                except Exception as error:  # storage may be briefly unavailable; commits check again
                    _log.warning("cannot write a heartbeat to %s: %s", place, error)

    def _beat(self, place: str) -> None:
        found = read_claim(place)
        if found is None or found.token != self.token:
            raise _lost(place, found)
        if is_local(place):
            os.utime(Path(place) / NAME)  # needs no disk space
            return
        held = self._held[place]
        self._held[place] = ClaimRecord(**{**asdict(held), "beats": held.beats + 1})
        _write(place, self._held[place])


@contextmanager
def committing(places: Sequence[str], token: str) -> Iterator[None]:
    """Opens a context in which this run may publish its results. Raises ConflictError if the claim on one of `places`
    is missing or has a token other than `token`. This happens, for example, after another run has taken over a claim.

    While the context is open, no other run can take over the claim on a local folder. An empty token disables the
    check.
    """
    with ExitStack() as locks:
        for place in dict.fromkeys(map(_plain, places if token else ())):
            locks.enter_context(_locked(place))
            found = read_claim(place)
            if found is None or found.token != token:
                raise _lost(place, found)
        yield


def read_claim(place: str) -> ClaimRecord | None:
    """Returns the claim on a folder, or None if the folder has no valid claim file. Raises StorageError if the folder
    cannot be read.
    """
    try:
        body = json.loads(_content(_plain(place)))
        types = {"epoch": int, "pid": int, "since_s": (int, float), "beats": int}
        values = {field.name: body[field.name] for field in fields(ClaimRecord)}
        is_valid = all(isinstance(value, types.get(name, str)) for name, value in values.items())  # type: ignore[arg-type]
        return ClaimRecord(**values) if is_valid else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _content(place: str) -> bytes:
    with named_failures(join(place, NAME)):
        if not is_local(place):
            fs, path = open_url(join(place, NAME))
            fs.invalidate_cache()
            return bytes(fs.cat_file(path))
        try:
            return (Path(place) / NAME).read_bytes()
        except NotADirectoryError as error:
            raise FileNotFoundError(str(error)) from None


_HINT = "Give this run another `out`, or stop the other run first."


def _taken(place: str, found: ClaimRecord | None) -> ConflictError:
    return ConflictError(f"{place} is being written by {found or 'another run'}.", hint=_HINT)


def _lost(place: str, found: ClaimRecord | None) -> ConflictError:
    return ConflictError(
        f"{place} was taken over by {found or 'a run that has ended'}: this run no longer writes there.",
        hint="Two runs cannot share one `out`; the other one continues from the last checkpoint.",
    )


def _own(holder: str, token: str, epoch: int) -> ClaimRecord:
    pid = os.getpid()
    return ClaimRecord(holder, token, epoch, socket.gethostname(), _boot(), pid, _started(pid), time.time())


def _boot() -> str:
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown-{secrets.token_hex(8)}"  # never equal, so heartbeats decide


def _is_alive(found: ClaimRecord) -> bool | None:
    """Returns whether the process of this machine is alive; None if the kernel does not show it."""
    try:
        if found.pid < 1:
            return None
        os.kill(found.pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return None
    return _started(found.pid) == found.started


def _started(pid: int) -> str:
    """Returns the start time of a process; empty if it is gone or a zombie."""
    process = Process.of(pid)
    return "" if process is None else str(process.start_time)


def _plain(place: str) -> str:
    return os.path.realpath(place.removeprefix("file://")) if is_local(place) else place.rstrip("/")


def _beat_of(place: str) -> object:
    """Returns the part of a heartbeat that is outside of the claim's content: the modification time of a local file."""
    if not is_local(place):
        return None
    try:
        return (Path(place) / NAME).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _write(place: str, held: ClaimRecord) -> None:
    if is_local(place):
        with full_disk_is_an_error(place):
            write_json(Path(place) / NAME, asdict(held), mode=0o644)
        return
    fs, path = open_url(join(place, NAME))
    with named_failures(place):
        fs.makedirs(fs._parent(path), exist_ok=True)
        fs.pipe_file(path, json.dumps(asdict(held), indent=1).encode())


def _remove(place: str) -> None:
    if is_local(place):
        (Path(place) / NAME).unlink(missing_ok=True)
        return
    fs, path = open_url(join(place, NAME))
    with named_failures(place):
        fs.rm_file(path)


@contextmanager
def _locked(place: str) -> Iterator[None]:
    """Locks a local folder, and creates the folder if needed; does nothing for a URL."""
    if not is_local(place):
        yield
        return
    with full_disk_is_an_error(place):
        Path(place).mkdir(parents=True, exist_ok=True)
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ConflictError(f"another process keeps {place} locked.", hint=_HINT) from None
                time.sleep(_POLL_S)
                continue
            except OSError:  # a network file system without folder locks: the token decides
                pass
            break
        yield
    finally:
        os.close(handle)
