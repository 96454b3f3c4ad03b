"""Whose memory keeps whose copy, and whether what is left after a loss is whole. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raytide.actors.trainer.checkpoint.staging import BufferEntry


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    step: int
    generation: str
    """Unique: two generations may pass the same step in different layouts."""


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """One rank's image of one snapshot, and in whose memory it lies."""

    snapshot: SnapshotId
    holder: int
    """A rank of the present generation."""
    origin: int
    """A rank of the generation that took it: two copies of one image have the same."""
    entries: tuple[BufferEntry, ...]
    elements: int
    """Of the whole state, over all ranks: a snapshot that has as many is whole."""


def assign_peers(hosts: Sequence[str]) -> list[int]:
    """For each rank, the one that keeps its copy: on another host for as many as the hosts allow."""
    world = len(hosts)
    by_host = sorted(range(world), key=lambda rank: (hosts[rank], rank))
    shift = max(Counter(hosts).values())
    if shift == world:
        shift = 1
    keeper = [0] * world
    for place, rank in enumerate(by_host):
        keeper[rank] = by_host[(place + shift) % world]
    return keeper


def count_elements(entries: Iterable[BufferEntry]) -> int:
    """How many different elements of the state these hold; replicas count once."""
    return sum({(entry.name, entry.offsets): entry.numel for entry in entries}.values())


def latest_complete(holdings: Sequence[SnapshotCopy]) -> SnapshotId | None:
    """The newest snapshot of which every element is in somebody's memory."""
    for snapshot in sorted({holding.snapshot for holding in holdings}, reverse=True):
        mine = [holding for holding in holdings if holding.snapshot == snapshot]
        if count_elements(entry for holding in mine for entry in holding.entries) == mine[0].elements:
            return snapshot
    return None
