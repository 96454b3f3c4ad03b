"""Tensor and sequence parallelism (Korthikanti et al., 2022).

Each rank of the tensor axis has some of the attention heads, a part of every feed-forward layer's width, and a part
of the vocabulary. Between these modules, where tokens are independent, a rank has a part of the sequence.

Every parameter is a DTensor over the axis, so that FSDP, checkpoints and norms see whole parameters. While a module
runs, hooks replace its DTensors by this rank's local tensors. No operator therefore needs DTensor support. A
replicated parameter sees only this rank's tokens or heads. Its gradient is thus a partial sum, which FSDP completes
before it reduces gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from raytide.actors.models.architecture import Architecture
from raytide.actors.trainer.distributed.collectives import gather, local, scatter
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.model.lora import LoraLinear
from raytide.actors.trainer.model.loss import IGNORE, loss_sum
from raytide.actors.trainer.model.transformer import SparseFeedForward, Transformer, TransformerBlock

_ROWS = ("q_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")


def divides_vocabulary(arch: Architecture, ranks: int) -> bool:
    """Returns whether the vocabulary is sharded over `ranks` ranks. If the vocabulary is not sharded, each rank
    predicts some of the tokens, over the whole vocabulary.
    """
    return arch.vocab_size % ranks == 0


def placement_of(arch: Architecture, name: str, ranks: int) -> Placement:
    """Returns a parameter's placement on the tensor axis. The gradient of a replicated parameter is a partial sum."""
    *_, parent, module, kind = ("", "", *name.split("."))
    if module in ("lora_a", "lora_b"):  # like the side of the weight that it adapts
        side = Shard(1 if module == "lora_a" else 0)
        return side if placement_of(arch, f"{parent}.weight", ranks) == side else Replicate()
    if module in ("embedding", "head"):
        return Shard(0) if divides_vocabulary(arch, ranks) else Replicate()
    if module in ("k_proj", "v_proj"):
        return Shard(0) if arch.num_kv_heads % ranks == 0 else Replicate()
    if module in _ROWS:
        return Shard(0)
    if module in _COLUMNS:
        return Shard(1) if kind == "weight" else Replicate()
    if kind in _ROWS:  # all experts in one parameter
        return Shard(1)
    return Shard(2) if kind in _COLUMNS else Replicate()


def reports_loss(part: Transformer, group: ProcessGroup) -> bool:
    """Returns whether this rank's loss counts. With a sharded vocabulary, all ranks of the tensor axis compute the same
    loss, and only that of the first rank counts. Otherwise every rank's loss counts.
    """
    return group.tensor_rank == 0 or not divides_vocabulary(part.arch, group.sizes.tensor)


def divide(part: Transformer, mesh: DeviceMesh, length: int) -> None:
    """Shards the parameters of a model part over the ranks of the tensor axis. Also installs the hooks that divide the
    part's computation among these ranks, for sequences of `length` tokens. The parameters must be on the meta device.
    """
    part.at_T = torch.arange(
        length, device=mesh.device_type
    )  # a stage gets pieces of sequences, and its attention sees whole ones
    ranks, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    for prefix, module in part.named_modules():
        parameters = list(module.named_parameters(prefix, recurse=False))
        for name, parameter in parameters:
            placed = distribute_tensor(
                parameter.detach(), mesh, [placement_of(part.arch, name, ranks)], src_data_rank=None
            )
            module.register_parameter(name.rpartition(".")[2], nn.Parameter(placed, parameter.requires_grad))
        if parameters:
            local_parameters = LocalParameters()
            module.register_forward_pre_hook(local_parameters.enter)
            module.register_forward_hook(local_parameters.leave, always_call=True)
    if part.embedding is not None and part.is_first:
        _embed(part.embedding, divides_vocabulary(part.arch, ranks), rank, ranks, group)
    if part.positions is not None:
        part.positions.register_forward_pre_hook(lambda _, args: (_own(args[0], -1, rank, ranks),))
    for layer in part.layers.values():
        assert isinstance(layer, TransformerBlock)
        _layer(layer, part.arch, rank, ranks, group)
    if part.is_last:
        part.loss = VocabularyLoss(group, divides_vocabulary(part.arch, ranks))


class LocalParameters:
    """Two hooks that replace a module's parameters by this rank's local tensors while the module runs."""

    def __init__(self) -> None:
        self._whole: dict[str, nn.Parameter | None] = {}

    def enter(self, module: nn.Module, args: Any) -> None:
        self._whole = dict(module._parameters)
        for name, parameter in self._whole.items():
            if parameter is not None:
                module._parameters[name] = local(parameter)  # type: ignore[assignment]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(self._whole)


def _layer(layer: TransformerBlock, arch: Architecture, rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """Gathers whole sequences before attention and feed-forward, and scatters their summed results."""

    def whole(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return gather(args[0], 1, group), *args[1:]

    def piece(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return scatter(out, 1, group)

    layer.attention.register_forward_pre_hook(whole)
    layer.ffn.register_forward_pre_hook(whole)
    _sum_out(layer.attention.o_proj, group)
    if isinstance(layer.ffn, SparseFeedForward):
        layer.ffn.register_forward_hook(piece)
    else:
        _sum_out(layer.ffn.down_proj, group)
    if arch.num_kv_heads % ranks:
        head = rank * arch.num_kv_heads // ranks  # shared by all of this rank's query heads
        for projection in (layer.attention.k_proj, layer.attention.v_proj):
            rows = projection.lora_b if isinstance(projection, LoraLinear) else None
            for linear in (projection, rows):
                if linear is not None:
                    linear.register_forward_pre_hook(_only(head * arch.head_dim, arch.head_dim))


def _sum_out(linear: nn.Linear, group: dist.ProcessGroup) -> None:
    """Makes the layer sum its output over the ranks and scatters the sum; the bias is added once, afterwards."""
    bias: list[Tensor | None] = [None]

    def without_bias(module: nn.Module, args: Any) -> None:
        bias[0], module._parameters["bias"] = module._parameters["bias"], None

    def summed(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        piece = scatter(out, 1, group)
        return piece if bias[0] is None else piece + bias[0]

    linear.register_forward_pre_hook(without_bias)  # after the LocalParameters hook
    linear.register_forward_hook(summed)


def _only(first: int, count: int) -> Any:
    """Returns a hook that selects the rows `first` to `first + count` of a replicated projection."""

    def narrow(module: nn.Module, args: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = parameter.narrow(0, first, count)  # type: ignore[assignment]

    return narrow


def _embed(embedding: nn.Embedding, divided: bool, rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """Changes the embedding so that it takes the ids of whole sequences and returns this rank's part of the embedded
    ones.
    """
    if not divided:
        embedding.register_forward_pre_hook(lambda _, args: (_own(args[0], 1, rank, ranks),))
        return
    size = embedding.num_embeddings // ranks
    absent: list[Tensor] = []

    def here(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        ids = args[0] - rank * size
        absent[:] = [(ids < 0) | (ids >= size)]
        return (ids.masked_fill(absent[0], 0),)

    def summed(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return scatter(out.masked_fill(absent.pop()[..., None], 0), 1, group)

    embedding.register_forward_pre_hook(here)
    embedding.register_forward_hook(summed)


def _own(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    size = x.shape[dim] // ranks
    return x.narrow(dim, rank * size, size)


class VocabularyLoss:
    """The summed cross entropy under tensor parallelism, used as `Transformer.loss`. No rank holds the logits of all
    tokens over the whole vocabulary.

    `x_BTD` is this rank's part of the sequences, and `targets_BT` has all targets. With a sharded vocabulary, a rank
    computes its part of every token's logits, and all ranks return the same loss. Otherwise a rank returns the loss of
    its own tokens.
    """

    def __init__(self, group: dist.ProcessGroup, divided: bool) -> None:
        self.group, self.divided = group, divided
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor, softcap: float | None = None) -> Tensor:
        if not self.divided:
            size = x_BTD.shape[1]
            mine_BT = targets_BT.narrow(1, self.rank * size, size)
            return loss_sum(x_BTD, local(head_VD), mine_BT, softcap)
        logits_NV = F.linear(gather(x_BTD, 1, self.group).flatten(0, 1), local(head_VD)).float()
        if softcap is not None:
            logits_NV = softcap * torch.tanh(logits_NV / softcap)
        first = self.rank * logits_NV.shape[1]
        loss: Tensor = _DividedCrossEntropy.apply(logits_NV, targets_BT.flatten(), first, self.group)  # type: ignore[no-untyped-call]
        return loss


class _DividedCrossEntropy(torch.autograd.Function):
    """Cross entropy over a sharded vocabulary: this rank has the logits of the ids from `first` on, and other ranks
    those of the other ids. The backward pass returns gradients of the local logits.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        highest_N1 = logits_NV.amax(1, keepdim=True)
        dist.all_reduce(highest_N1, dist.ReduceOp.MAX, group=group)
        share_NV = (logits_NV - highest_N1).exp_()
        here_N = (targets_N >= first) & (targets_N < first + logits_NV.shape[1])
        column_N1 = (targets_N - first).masked_fill(~here_N, 0)[:, None]
        target_N = logits_NV.gather(1, column_N1)[:, 0].masked_fill(~here_N, 0.0)
        sums_2N = torch.stack((share_NV.sum(1), target_N))
        dist.all_reduce(sums_2N, group=group)
        counts_N = targets_N != IGNORE
        loss_N = sums_2N[0].log() + highest_N1[:, 0] - sums_2N[1]
        share_NV /= sums_2N[0][:, None]
        ctx.save_for_backward(share_NV, column_N1, here_N, counts_N)
        return loss_N.masked_fill(~counts_N, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        share_NV, column_N1, here_N, counts_N = ctx.saved_tensors
        change_NV = share_NV.scatter_add(1, column_N1, -here_N[:, None].to(share_NV.dtype))
        return change_NV * (counts_N[:, None] * gradients[0]), None, None, None
