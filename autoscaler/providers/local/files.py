"""The folder of one local node, `<run>/nodes/<node-id>/`: what was bought and when it ended, whoever is killed when.

`machine.json` is written before anything runs, so a node is billed from then; `lock` is held by the node's process
for its whole life; `ended.json` is written once, by whoever first sees the lock free, and every later reader bills it.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from raytide.core.io.atomic_file import create_json, read_json, write_json
from raytide.core.io.process import Process, kill_marked

MARK = "RAYTIDE_NODE"
"""Environment variable of every process of a node; its value is the node's folder."""


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """What was bought: `machine.json`."""

    node_id: str
    node_type: str
    zone: str
    price_micro_usd_h: int
    started_at_s: float
    slot: int
    """N of its address 127.0.K.N."""
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

    @property
    def mark(self) -> str:
        return str(self.path)

    @property
    def log(self) -> Path:
        return self.path / "log"

    def machine(self) -> LocalMachine | None:
        record = read_json(self.path / "machine.json")
        return None if record is None else LocalMachine(**record)

    def buy(self, purchase: LocalMachine) -> bool:
        """Whether this call was the one that bought it."""
        return create_json(self.path / "machine.json", asdict(purchase))

    def take_lock(self) -> int | None:
        """A locked file descriptor, to be inherited by the node's process; None while another holds it."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def is_running(self) -> bool:
        fd = self.take_lock()
        if fd is None:
            return True
        os.close(fd)
        return False

    def process(self) -> Process | None:
        """The node's first process, once it has started."""
        return Process.read(self.path / "process.json")

    def record_process(self, process: Process) -> None:
        process.write(self.path / "process.json")

    def announce_end(self, reason: str) -> None:
        """Say beforehand why the node will end; the first to say so is believed."""
        create_json(self.path / "reason.json", {"reason": reason})

    def end(self) -> End | None:
        record = read_json(self.path / "ended.json")
        return None if record is None else End(**record)

    def record_end(self, now_s: float) -> End:
        """The node's end, recorded now unless it was before; whatever its process left behind is killed first.

        A clock that was set back does not make it end before it began.
        """
        kill_marked(MARK, self.mark)
        said = read_json(self.path / "reason.json") or {"reason": "its process was killed"}
        purchase = self.machine()
        ended_at_s = now_s if purchase is None else max(now_s, purchase.started_at_s)
        create_json(self.path / "ended.json", {"ended_at_s": ended_at_s, "reason": said["reason"]})
        end = self.end()
        assert end is not None
        return end

    def meter(self) -> str:
        """Where its fake GPU exporter listens; empty when it has none."""
        record = read_json(self.path / "meter.json")
        return "" if record is None else str(record["address"])

    def record_meter(self, address: str) -> None:
        write_json(self.path / "meter.json", {"address": address})

    def notice(self) -> float | None:
        """When the provider will take the node back, if it said so."""
        record = read_json(self.path / "notice.json")
        return None if record is None else float(record["deadline_s"])

    def give_notice(self, deadline_s: float) -> None:
        write_json(self.path / "notice.json", {"deadline_s": deadline_s})


def node_names(run_dir: Path) -> list[str]:
    """The ids of all nodes whose folder is there, bought or not."""
    with os.scandir(run_dir / "nodes") as found:
        return [entry.name for entry in found if entry.is_dir()]


def node_folders(run_dir: Path) -> list[NodeFolder]:
    """Every node that was ever bought, in order of purchase."""
    folders = (NodeFolder(path.parent) for path in (run_dir / "nodes").glob("*/machine.json"))
    bought = [(purchase, folder) for folder in folders if (purchase := folder.machine()) is not None]
    return [folder for _, folder in sorted(bought, key=lambda item: (item[0].started_at_s, item[0].slot))]
