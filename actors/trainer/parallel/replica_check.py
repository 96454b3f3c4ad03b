"""Checks that all ranks with copies of the same weights hold the same bits.

Replicas on equal devices get bit-identical gradients and never drift apart. A difference therefore means faulty
hardware or an error in the gradient exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from raytide.actors.trainer.distributed.local_shards import local
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.core.errors import TrainError
from raytide.core.specs.parallelism import Sizes

_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check(weights: Iterable[Tensor], group: ProcessGroup, name: str, step: int) -> None:
    """Compares the weights of all replicas. All ranks must call it together. If some weights differ, every rank raises
    TrainError.
    """
    if group.sizes.replicate == 1:
        return
    own_digest = weight_digest(weights, group.device)
    gathered = torch.empty(group.world, dtype=torch.int64, device=group.device)
    dist.all_gather_into_tensor(gathered, own_digest)
    digests = gathered.tolist()
    for ranks in replica_groups(group.sizes):
        if odd := find_outliers([digests[rank] for rank in ranks]):
            outliers = ", ".join(str(ranks[place]) for place in odd)
            others = ", ".join(str(rank) for place, rank in enumerate(ranks) if place not in odd)
            which = (
                f"those of rank {outliers} differ from those of rank {others}" if others else f"all differ: {outliers}"
            )
            raise TrainError(
                f"the replicas of {name} do not have the same weights after step {step}: {which}.",
                hint="Test these ranks' devices and memory; replicas were equal at the last checkpoint. Devices "
                "of different kinds may round differently: set replica_check_every to 0 for them.",
            )


def replica_groups(sizes: Sizes) -> list[list[int]]:
    """Returns the groups of ranks that hold copies of the same weights."""
    shape = (sizes.pipeline, sizes.replicate, sizes.shard * sizes.context * sizes.tensor)
    groups: list[list[int]] = torch.arange(sizes.world).view(shape).movedim(1, -1).reshape(-1, sizes.replicate).tolist()
    return groups


def find_outliers(digests: Sequence[int]) -> list[int]:
    """Returns the indices of the digests that differ from the majority. Returns all indices if there is no majority,
    and none if all digests agree.
    """
    (value, count), *others = Counter(digests).most_common()
    if not others:
        return []
    return [place for place, each in enumerate(digests) if each != value or 2 * count <= len(digests)]


@torch.no_grad()
def weight_digest(weights: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns a digest of the weights, [1] in int64.

    The bits of each tensor are added up as integers. The sum of each tensor is multiplied by a different odd number.
    One changed bit therefore always changes the digest. NaNs are compared like other bits.
    """
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for number, weight in enumerate(weights):
        bits = local(weight).detach()
        bits = bits.view(_AS_INTEGERS[bits.element_size()])
        total += bits.sum(dtype=torch.int64) * (2 * number + 1)
    return total
