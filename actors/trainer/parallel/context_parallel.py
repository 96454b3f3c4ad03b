"""Context parallelism. Each rank has a part of every sequence, and attention gathers the keys and values of all parts.

With C context ranks, a sequence is cut into 2C pieces. Rank c has the pieces c and 2C-1-c, which balances the work
under a causal mask. Torch's own context parallelism runs on CUDA only. This implementation runs on any device, and
supports sliding windows and soft-caps.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from raytide.actors.trainer.distributed.collectives import gather
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.model.transformer import Attend, Attention, Transformer
from raytide.kernels.core import AttentionSpec


def divide(part: Transformer, group: ProcessGroup, length: int) -> None:
    """Changes the model part so that it computes this rank's part of each sequence. `length` is the number of tokens of
    a whole sequence.
    """
    if group.context is None:
        return
    part.at_T = positions(group.context_rank, group.sizes.context, length).to(group.device)
    for module in part.modules():
        if isinstance(module, Attention):
            module.attend = partial(_attend, rank=group.context_rank, group=group.context, attend=module.attend)


def shard_sequence(x_BT: Tensor, group: ProcessGroup) -> Tensor:
    """Returns this rank's columns of the batch `x_BT`, whose rows are whole sequences."""
    if group.context is None:
        return x_BT
    return x_BT[:, positions(group.context_rank, group.sizes.context, x_BT.shape[1]).to(x_BT.device)]


def positions(rank: int, ranks: int, length: int) -> Tensor:
    """Returns the positions of a rank's tokens in the sequence, ascending."""
    by_piece = torch.arange(length).view(2 * ranks, -1)
    return by_piece[[rank, 2 * ranks - 1 - rank]].flatten()


def _attend(
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    spec: AttentionSpec,
    documents_BT: Tensor | None = None,
    *,
    rank: int,
    group: dist.ProcessGroup,
    attend: Attend,
) -> Tensor:
    """Runs attention for each of this rank's two pieces of queries, over the keys up to the end of the piece.
    `documents_BT` has whole rows.
    """
    ranks, piece = dist.get_world_size(group), q_BHTC.shape[2] // 2
    both = gather(torch.stack((k_BKTC, v_BKTC)), 3, group)
    k_BKSC, v_BKSC = _ordered(both, ranks).unbind()
    outs = []
    for index, queries in zip((rank, 2 * ranks - 1 - rank), q_BHTC.split(piece, dim=2), strict=True):
        end = (index + 1) * piece
        documents_BS = None if documents_BT is None else documents_BT[:, :end]
        outs.append(attend(queries, k_BKSC[:, :, :end], v_BKSC[:, :, :end], spec, documents_BS))
    return torch.cat(outs, dim=2)


def _ordered(gathered_xBKSC: Tensor, ranks: int) -> Tensor:
    """Reorders pieces from rank order (0, 2C-1, 1, 2C-2, ...) to sequence order."""
    pieces_xBKPTC: Tensor = gathered_xBKSC.unflatten(3, (2 * ranks, -1))
    order = [2 * index if index < ranks else 2 * (2 * ranks - 1 - index) + 1 for index in range(2 * ranks)]
    return pieces_xBKPTC[:, :, :, order].flatten(3, 4)
