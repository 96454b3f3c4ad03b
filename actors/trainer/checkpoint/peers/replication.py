"""Assigns to each rank a peer that holds a copy of the rank's snapshot. After a loss of ranks, finds the newest
snapshot that is complete in the copies that are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raytide.actors.trainer.checkpoint.staging import BufferEntry


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    step: int
    generation: str
    """Unique per generation: two generations may pass the same step in different layouts."""
    digests: tuple[tuple[str, str], ...] = ()
    """Digests of what a resumed run must match, by name."""


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """A copy of one rank's shards of a snapshot, and the rank that holds the copy."""

    snapshot: SnapshotId
    holder: int
    """The rank that holds the copy, in the present generation."""
    origin: int
    """The rank whose shards they are, in the generation that took the snapshot. Two copies of one rank's shards have
    the same origin.
    """
    entries: tuple[BufferEntry, ...]
    elements: int
    """The number of elements of the whole state over all ranks: a snapshot with all of them is complete."""


def assign_peers(hosts: Sequence[str]) -> list[int]:
    """Returns, for each rank, the peer that holds the rank's snapshot copy. The peer is on another host where
    possible.
    """
    world = len(hosts)
    by_host = sorted(range(world), key=lambda rank: (hosts[rank], rank))
    shift = max(Counter(hosts).values())
    if shift == world:
        shift = 1
    holders = [0] * world
    for place, rank in enumerate(by_host):
        holders[rank] = by_host[(place + shift) % world]
    return holders


def count_elements(entries: Iterable[BufferEntry]) -> int:
    """Returns the number of distinct tensor elements in these entries. Replicas of a shard count once."""
    return sum({(entry.name, entry.offsets): entry.numel for entry in entries}.values())


def latest_complete(all_copies: Sequence[SnapshotCopy]) -> SnapshotId | None:
    """Returns the newest complete snapshot, or None if there is none. In a complete snapshot, each element is in the
    memory of at least one rank.
    """
    for snapshot in sorted({copy.snapshot for copy in all_copies}, reverse=True):
        copies = [copy for copy in all_copies if copy.snapshot == snapshot]
        if count_elements(entry for copy in copies for entry in copy.entries) == copies[0].elements:
            return snapshot
    return None
