"""One rank of the optimisers' tests: the same updates on shards and on the whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from raytide.actors.trainer.distributed.local_shards import like, local, part
from raytide.actors.trainer.optim import registry
from raytide.core.specs.train import MemorySpec, OptimSpec

SHAPES = {
    "embedding.weight": (40, 24),
    "layers.0.up.weight": (128, 32),
    "layers.0.down.weight": (32, 128),
    "layers.0.norm.weight": (24,),
    "layers.1.odd.weight": (7, 24),
}


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        first, second = nn.Module(), nn.Module()
        first.up, first.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)
        first.norm = nn.RMSNorm(24)
        second.odd = nn.Linear(24, 7, bias=False)
        self.layers = nn.ModuleList([first, second])


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def plain(seed: int) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value) for name, value in values(seed).items()}


def sharded(seed: int, world: int) -> dict[str, nn.Parameter]:
    """Two ranks: FSDP. Four: FSDP over tensor parallel, with strided shards and parameters on two meshes."""
    toy = Toy()
    if world == 2:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        plan = {
            "layers.0.up": ColwiseParallel(),
            "layers.0.down": RowwiseParallel(),
            "layers.0.norm": SequenceParallel(),
        }
        parallelize_module(toy, mesh["tensor"], plan)
    fully_shard(toy, mesh=mesh["shard"])
    parameters = dict(toy.named_parameters())
    for name, value in values(seed).items():
        local(parameters[name].data).copy_(part(value, parameters[name]))
    toy.requires_grad_(True)
    return parameters


def set_grads(parameters: dict[str, nn.Parameter], step: int) -> None:
    for name, grad in values(1000 + step).items():
        parameter = parameters[name]
        parameter.grad = like(part(0.1 * grad, parameter).clone(), parameter)


def distance(parameters: dict[str, nn.Parameter], others: dict[str, nn.Parameter]) -> float:
    return max(float((whole(parameters[name]) - whole(others[name])).abs().max().detach()) for name in SHAPES)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(names: list[str], steps: int, rank: int, world: int, meet: str) -> dict[str, tuple[float, float, float]]:
    """Returns for each optimiser how far the shards are from the whole after the steps, how far their states are, and
    how far they are after three more steps of the whole's state on the shards.
    """
    dist.init_process_group("gloo", store=dist.FileStore(meet, world), rank=rank, world_size=world)
    out = {}
    for name in names:
        spec = OptimSpec(name=name, lr=0.01)
        here, there = sharded(5, world), plain(5)
        ours = registry.build(here.items(), spec, MemorySpec())
        theirs = registry.build(there.items(), spec, MemorySpec())
        run(ours, here, range(steps))
        run(theirs, there, range(steps))
        after = distance(here, there)
        mine, whole_state = ours.tensors(), theirs.tensors()
        state = max(float((whole(mine[key]) - whole_state[key]).abs().max()) for key in whole_state)
        again = sharded(5, world)
        for key, parameter in again.items():
            local(parameter.data).copy_(part(there[key].detach(), parameter))
        other = registry.build(again.items(), spec, MemorySpec())
        moments = other.tensors()
        for key, tensor in moments.items():
            local(tensor).copy_(part(whole_state[key], tensor))
        other.load(moments)
        run(other, again, range(steps, steps + 3))
        run(theirs, there, range(steps, steps + 3))
        out[name] = (after, state, distance(again, there))
    dist.destroy_process_group()
    return out


def run(optimizer: registry.Optimizer, parameters: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        set_grads(parameters, step)
        optimizer.step()
        optimizer.zero_grad()
