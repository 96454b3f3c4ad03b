"""The quarantine of the operator's own machines: a machine in quarantine gets no node.

After a failure a machine stays in quarantine for a time that grows with each failure. An operator can also order a
quarantine, which then lasts until an operator lifts it. Each machine in quarantine has a file in the run folder.
Therefore a new controller knows the quarantine, and an operator can change it while no controller runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from raytide.core.clock import Clock, utc
from raytide.core.io.atomic_file import read_json, write_json

FIRST_S, LONGEST_S = 60.0, 3600.0
"""The wait after the first failure of a machine, which doubles with each further failure, and the longest wait."""


@dataclass(frozen=True, slots=True)
class QuarantinedHost:
    """A machine in quarantine, with the reason of its last failure. It is used again after `until_s`. If `until_s` is
    None, only an operator ends the quarantine.
    """

    host: str
    reason: str
    since_s: float
    until_s: float | None
    failures: int

    def holds(self, now_s: float) -> bool:
        return self.until_s is None or now_s < self.until_s

    def describe(self) -> str:
        until = "until it is released" if self.until_s is None else f"until {utc(self.until_s)}"
        return f"host {self.host} is in quarantine {until}: {self.reason} `raytide nodes release {self.host}` ends it."


def quarantine_folder(run_dir: Path) -> Path:
    return run_dir / "hosts" / "quarantine"


class HostQuarantine:
    """The quarantine of one cluster's machines. Its records are files in one folder."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def add(self, host: str, reason: str, *, is_until_lifted: bool = False) -> QuarantinedHost:
        """Puts the machine into quarantine after a failure, for a time that grows with each failure.

        `is_until_lifted` marks an operator's order. Such a quarantine lasts until an operator lifts it.
        """
        before, now_s = self._read(host), self._clock.now_s()
        failures = 1 + (before.failures if before is not None else 0)
        if is_until_lifted or (before is not None and before.until_s is None):
            until_s = None
        else:
            until_s = now_s + min(LONGEST_S, FIRST_S * 2.0 ** min(failures - 1, 16))
        entry = QuarantinedHost(host, reason, now_s, until_s, failures)
        write_json(self._folder / f"{host}.json", asdict(entry))
        return entry

    def lift(self, host: str) -> bool:
        """Ends the machine's quarantine and deletes the record of its failures. Returns whether there was such a
        record.
        """
        path = self._folder / f"{host}.json"
        was_there = path.exists()
        path.unlink(missing_ok=True)
        return was_there

    def succeed(self, host: str) -> None:
        """Deletes the record of the machine's failures. It is called when a node has started on the machine. A
        quarantine that an operator ordered stays in force.
        """
        entry = self._read(host)
        if entry is not None and entry.until_s is not None:
            self.lift(host)

    def held(self, host: str) -> QuarantinedHost | None:
        entry = self._read(host)
        return entry if entry is not None and entry.holds(self._clock.now_s()) else None

    def all_held(self) -> tuple[QuarantinedHost, ...]:
        found = (self.held(path.stem) for path in sorted(self._folder.glob("*.json")))
        return tuple(entry for entry in found if entry is not None)

    def _read(self, host: str) -> QuarantinedHost | None:
        record = read_json(self._folder / f"{host}.json")
        return None if record is None else QuarantinedHost(**record)
