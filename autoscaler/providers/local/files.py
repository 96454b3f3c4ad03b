"""The folder of one local node, `<run>/nodes/<node-id>/`. It records the node's purchase and end, and stays correct if
a process is killed at any time.

`machine.json` is written before anything runs, and the node is billed from then on. The node's process holds `lock` for
its whole life. `ended.json` is written once, by the first reader that finds the lock free.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from raytide.core.io.atomic_file import create_json, read_json, write_json
from raytide.core.io.process import Process, kill_marked

MARK = "RAYTIDE_NODE"
"""An environment variable of every process of a node; its value is the node's folder."""


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """The content of `machine.json`."""

    node_id: str
    node_type: str
    zone: str
    price_micro_usd_h: int
    started_at_s: float
    slot: int
    """N in the node's address 127.0.K.N."""
    address: str
    resources: dict[str, float]
    labels: dict[str, str]
    gcs_address: str
    temp_dir: str


@dataclass(frozen=True, slots=True)
class End:
    ended_at_s: float
    reason: str


class NodeFolder:
    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.node_id = path.name
        self.mark, self.log = str(self.path), self.path / "log"

    def machine(self) -> LocalMachine | None:
        record = read_json(self.path / "machine.json")
        return None if record is None else LocalMachine(**record)

    def buy(self, purchase: LocalMachine) -> bool:
        """Records the purchase of the node. Returns False if a purchase was recorded already."""
        return create_json(self.path / "machine.json", asdict(purchase))

    def take_lock(self) -> int | None:
        """Returns a locked file descriptor for the node's process to inherit. Returns None while another process holds
        the lock.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def spawn(
        self, module: str, lock: int, environment: Mapping[str, str], options: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Starts a Python module as the node's process, in a session of its own. The process inherits the lock and
        writes to the node's log.
        """
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, str(self.path), str(lock), *options],
                env={**environment, MARK: self.mark},
                cwd=self.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock,),
            )

    def is_running(self) -> bool:
        fd = self.take_lock()
        if fd is None:
            return True
        os.close(fd)
        return False

    def process(self) -> Process | None:
        """Returns the node's first process, or None before that process has started."""
        return Process.read(self.path / "process.json")

    def record_process(self, process: Process) -> None:
        process.write(self.path / "process.json")

    def announce_end(self, reason: str) -> None:
        """Records why the node will end. If a reason is recorded already, it stays."""
        create_json(self.path / "reason.json", {"reason": reason})

    def end(self) -> End | None:
        record = read_json(self.path / "ended.json")
        return None if record is None else End(**record)

    def record_end(self, now_s: float) -> End:
        """Kills the remaining processes of the node, and records the node's end unless an end is recorded already.

        The recorded end is never before the start, even if the clock was set back.
        """
        kill_marked(MARK, self.mark)
        reason = read_json(self.path / "reason.json") or {"reason": "its process was killed"}
        purchase = self.machine()
        ended_at_s = now_s if purchase is None else max(now_s, purchase.started_at_s)
        create_json(self.path / "ended.json", {"ended_at_s": ended_at_s, "reason": reason["reason"]})
        end = self.end()
        assert end is not None
        return end

    def record_earlier_end(self, ended_at_s: float, reason: str) -> None:
        """Records the end of a node of a restored cluster, unless an end is recorded already. Kills no process."""
        create_json(self.path / "ended.json", {"ended_at_s": ended_at_s, "reason": reason})

    def meter(self) -> str:
        """Returns `host:port` of the node's fake GPU exporter, or an empty string if the node has none."""
        record = read_json(self.path / "meter.json")
        return "" if record is None else str(record["address"])

    def record_meter(self, address: str) -> None:
        write_json(self.path / "meter.json", {"address": address})

    def notice(self) -> float | None:
        """Returns the deadline of the node's interruption notice, or None if the node got no notice."""
        record = read_json(self.path / "notice.json")
        return None if record is None else float(record["deadline_s"])

    def give_notice(self, deadline_s: float) -> None:
        write_json(self.path / "notice.json", {"deadline_s": deadline_s})


def node_names(run_dir: Path) -> list[str]:
    """Returns the ids of all nodes that have a folder. A node may have a folder although it was never bought."""
    with os.scandir(run_dir / "nodes") as found:
        return [entry.name for entry in found if entry.is_dir()]


def node_folders(run_dir: Path) -> list[NodeFolder]:
    """Returns the folders of all nodes that were ever bought, in order of purchase."""
    folders = (NodeFolder(path.parent) for path in (run_dir / "nodes").glob("*/machine.json"))
    bought = [(purchase, folder) for folder in folders if (purchase := folder.machine()) is not None]
    return [folder for _, folder in sorted(bought, key=lambda item: (item[0].started_at_s, item[0].slot))]
