"""Simulated spot behaviour of local nodes, controlled from any process: notices, reclaims and stock-outs."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from raytide.autoscaler.providers.local.events import poke
from raytide.autoscaler.providers.local.files import NodeFolder
from raytide.core.clock import Clock, SystemClock
from raytide.core.errors import NotFoundError
from raytide.core.io.atomic_file import read_json, write_json

Pool = tuple[str, str]
"""Node type and zone; the zone `*` means all of them."""


def give_notice(run_dir: Path, node_id: str, deadline_s: float) -> None:
    """Announces that the node will be reclaimed at `deadline_s` (seconds since the epoch). Does not reclaim it."""
    _bought(run_dir, node_id).give_notice(deadline_s)
    poke(run_dir)


def reclaim(run_dir: Path, node_id: str, *, clock: Clock | None = None) -> None:
    """Reclaims the node at once, with SIGKILL to all its processes."""
    folder = _bought(run_dir, node_id)
    if folder.end() is not None:
        return
    folder.announce_end("reclaimed")
    process = folder.process()
    if process is not None:
        process.send(signal.SIGKILL)
    folder.record_end((clock or SystemClock()).now_s())
    poke(run_dir)


def set_stockouts(run_dir: Path, pools: Iterable[Pool]) -> None:
    """Marks the given pools as out of stock, so that they refuse launches. All other pools are then in stock."""
    write_json(run_dir / "stockouts.json", {"pools": [list(pool) for pool in pools]})


def is_out_of_stock(run_dir: Path, node_type: str, zone: str) -> bool:
    record = read_json(run_dir / "stockouts.json") or {"pools": []}
    return any(pool in ([node_type, zone], [node_type, "*"]) for pool in record["pools"])


def _bought(run_dir: Path, node_id: str) -> NodeFolder:
    folder = NodeFolder(run_dir / "nodes" / node_id)
    if folder.machine() is None:
        raise NotFoundError(f"the local provider has no node {node_id}.", hint="`raytide status` lists the nodes.")
    return folder
