"""A group is left without a trace: torch would keep what it worked out for the ranks' old numbers, and the sockets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from raytide.actors.trainer.distributed import process_group
from raytide.core.specs.parallelism import Sizes

SIZES = Sizes(shard=2)


def test_ranks_that_change_places_hold_the_other_shard(run_ranks: Callable[..., list[Any]]) -> None:
    """4 elements over 2 ranks: the second rank's begin at 2, also where it was the first rank before."""
    assert run_ranks(2, _change_places) == [[0, 2], [2, 0]]


def test_a_group_that_was_left_has_closed_its_sockets(run_ranks: Callable[..., list[Any]]) -> None:
    for before, within, after in run_ranks(2, _count_sockets):
        assert within > before
        assert after == before


def test_a_rank_whose_peer_died_as_the_group_formed_meets_a_new_process(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, _lose_a_peer_first) == [0, 2]


def _lose_a_peer_first(rank: int, world: int, meet: str) -> int:
    if rank == 0:
        with pytest.raises(RuntimeError, match="timeout"):
            process_group.join(dist.FileStore(f"{meet}-before", 2), rank, SIZES, timeout_s=0.5)
        process_group.leave()
    return _begin_of_a_sum(rank, meet)


def _change_places(rank: int, world: int, meet: str) -> list[int]:
    begins = []
    for number, as_rank in enumerate((rank, 1 - rank)):
        begins.append(_begin_of_a_sum(as_rank, f"{meet}-{number}"))
        process_group.leave()
    return begins


def _count_sockets(rank: int, world: int, meet: str) -> tuple[int, int, int]:
    before = _sockets()
    _begin_of_a_sum(rank, meet)
    within = _sockets()
    process_group.leave()
    return before, within, _sockets()


def _begin_of_a_sum(rank: int, meet: str) -> int:
    """Returns where this rank's part of a DTensor begins that an operator made."""
    mine = process_group.join(dist.FileStore(meet, 2), rank, SIZES, timeout_s=20.0)
    part = DTensor.from_local(torch.ones(2), mine.mesh["shard"], [Shard(0)])
    total = part + part
    assert total.full_tensor().tolist() == [2.0] * 4
    (chunk,) = total.__create_chunk_list__()
    return int(chunk.offsets[0])


def _sockets() -> int:
    return sum("socket:" in os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink())
