"""Peers keep copies of each other's snapshots, and a whole snapshot is found again."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.trainer.checkpoint.peers.replication import SnapshotCopy, SnapshotId, assign_peers, latest_complete
from raytide.actors.trainer.checkpoint.staging import BufferEntry


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_rank_has_one_buddy_on_another_host_where_hosts_allow(hosts: list[str]) -> None:
    keeper = assign_peers(hosts)
    world = len(hosts)
    assert sorted(keeper) == list(range(world))
    if world > 1:
        assert all(keeper[rank] != rank for rank in range(world))
    most = max(Counter(hosts).values())
    apart = sum(hosts[rank] != hosts[keeper[rank]] for rank in range(world))
    assert apart == (world if 2 * most <= world else 2 * (world - most))


def images(world: int, replicas: int) -> list[tuple[BufferEntry, ...]]:
    """Returns images of a tensor (4 rows a rank) and a number that all have; every `replicas` ranks hold equal rows."""
    rows = 4 * (world // replicas)
    return [
        (
            BufferEntry("model.w", (rows, 3), (4 * (rank // replicas), 0), (4, 3), torch.float32, 0),
            BufferEntry("optim.w.step", (), (), (), torch.float32, 64),
        )
        for rank in range(world)
    ]


@given(data=st.data(), world=st.integers(1, 8), replicated=st.booleans())
def test_a_snapshot_counts_if_every_piece_is_left_and_the_newest_such_one_is_taken(
    data: st.DataObject, world: int, replicated: bool
) -> None:
    replicas = 2 if replicated and world % 2 == 0 else 1
    layouts = images(world, replicas)
    hosts = data.draw(st.lists(st.sampled_from("ab"), min_size=world, max_size=world))
    keeper = assign_peers(hosts)
    left = data.draw(st.sets(st.integers(0, world - 1)))
    arrived = data.draw(st.sets(st.integers(0, world - 1)))
    """The ranks whose images of the newer snapshot have reached their buddies."""
    elements = 12 * (world // replicas) + 1
    older, newer = SnapshotId(4, "g"), SnapshotId(8, "g")
    holdings = []
    for holder in left:
        ward = keeper.index(holder)
        for snapshot, origin in [(older, holder), (older, ward), (newer, holder), (newer, ward)]:
            if snapshot == older or origin == holder or origin in arrived:
                holdings.append(SnapshotCopy(snapshot, holder, origin, layouts[origin], elements))

    def whole(snapshot: SnapshotId) -> bool:
        origins = {holding.origin // replicas for holding in holdings if holding.snapshot == snapshot}
        return origins == set(range(world // replicas))

    expected = next((snapshot for snapshot in (newer, older) if whole(snapshot)), None)
    assert latest_complete(holdings) == expected
