"""The process group of one generation of ranks, and the few collectives the loop needs.

A group is left and joined again in the same process when the gang changes: starting a process costs 10 s of imports,
joining a group costs under one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    HashStore,
    Store,
    TCPStore,
)  # torch.distributed has them, but not for type checkers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raytide.actors.trainer.distributed import torch_compat
from raytide.core.errors import ConfigError, RaytideError
from raytide.core.specs.parallelism import AXES, Parallelism, Sizes

T = TypeVar("T")
IO_TIMEOUT_S = 600.0
STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    rank: int
    world: int
    device: torch.device
    sizes: Sizes
    mesh: DeviceMesh
    """pipeline x replicate x shard x tensor. A context's ranks are part of "shard" here: they divide the weights."""
    io: dist.ProcessGroup
    """For checkpoints, on gloo: their waits are long, and theirs alone, so that a hung step is still seen quickly."""
    context: dist.ProcessGroup | None = None
    """The ranks that share this one's sequences, when there are several."""
    generation: int = 0
    """Which forming of the gang this is."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_mesh(self) -> DeviceMesh:
        """Over which FSDP divides and copies."""
        return self.mesh["replicate", "shard"] if self.sizes.replicate > 1 else self.mesh["shard"]

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks that hold copies of what this one holds."""
        return self.mesh.get_group("replicate")

    @property
    def data_rank(self) -> int:
        """Which part of a global batch is this rank's."""
        shard = self.mesh.get_local_rank("shard") // self.sizes.context
        return self.mesh.get_local_rank("replicate") * self.sizes.shard + shard

    @property
    def context_rank(self) -> int:
        return self.mesh.get_local_rank("shard") % self.sizes.context

    @property
    def tensor_rank(self) -> int:
        return self.mesh.get_local_rank("tensor")

    @property
    def pipeline_rank(self) -> int:
        return self.mesh.get_local_rank("pipeline")

    @property
    def gradient_divisor(self) -> int:
        """FSDP gives the mean of so many ranks' gradients, where their sum is meant."""
        return self.sizes.data * self.sizes.context

    @property
    def is_data_first(self) -> bool:
        """Whether this rank is the one that speaks for its part of the global batch."""
        return self.tensor_rank == self.context_rank == self.pipeline_rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in fp64."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        summed: list[float] = totals.tolist()
        return summed

    def from_first(self, value: T) -> T:
        """Rank 0's value, on every rank; the others wait for as long as rank 0 may be busy with files."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.io)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        values = [value] * self.world
        dist.all_gather_object(values, value, group=self.io)
        return values

    def run_on_all(self, work: Callable[[], T]) -> T:
        """What `work` gives on this rank, once it is done on all: the others wait for as long as files may take. Its
        RaytideError on one rank is raised on every rank."""
        done, failed = None, None
        try:
            done = work()
        except RaytideError as error:
            failed = error
        for each in self.gather(failed):
            if each is not None:
                raise each
        return cast(T, done)

    def new_channel(self) -> dist.ProcessGroup:
        """A group of all ranks for one thread beside the training: two threads that share a gloo group break it."""
        channel = dist.new_group(backend="gloo", timeout=timedelta(seconds=IO_TIMEOUT_S))
        assert isinstance(channel, dist.ProcessGroup)
        return channel


def create_store(address: str, world: int) -> TCPStore:
    """A meeting place for `world` ranks on a free port of this host; it lives as long as the object."""
    return TCPStore(address, 0, world, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)


def connect_store(address: str, port: int, world: int) -> TCPStore:
    return TCPStore(address, port, world, is_master=False, timeout=STORE_TIMEOUT)


def join(
    store: Store,
    rank: int,
    sizes: Sizes,
    *,
    timeout_s: float,
    address: str = "127.0.0.1",
    generation: int = 0,
) -> ProcessGroup:
    """Meet the other ranks at `store`. `address` is this rank's own: loopback nodes must not look up a host name."""
    if address.startswith("127."):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cuda = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=sizes.world, timeout=timeout)
    return _joined(sizes, timeout_s, generation)


def adopt(layout: Parallelism, *, timeout_s: float) -> ProcessGroup:
    """The group of a process group that somebody else made and will end, such as Ray Train. It has no spares."""
    world = dist.get_world_size()
    sizes = layout.sizes(world)
    if sizes.world != world:
        raise ConfigError(
            f"{world} workers cannot all have a part in a layout of {sizes}.",
            hint=f"Start {sizes.world}, or change layout.",
        )
    return _joined(sizes, timeout_s, generation=0)


def leave() -> None:
    """Give the group up, healthy or not. Closing its sockets also wakes peers that wait for this rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch_compat.forget_meshes()


def _joined(sizes: Sizes, timeout_s: float, generation: int) -> ProcessGroup:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch_compat.tell_meshes_apart()
    shape = (sizes.pipeline, sizes.replicate, sizes.shard * sizes.context, sizes.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    io = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(timeout_s, IO_TIMEOUT_S)))
    assert isinstance(io, dist.ProcessGroup)
    return ProcessGroup(dist.get_rank(), sizes.world, device, sizes, mesh, io, _context(sizes), generation)


def _context(sizes: Sizes) -> dist.ProcessGroup | None:
    """Every rank makes all of them, as torch wants it."""
    if sizes.context == 1:
        return None
    ranks = torch.arange(sizes.world).view(sizes.shape).movedim(AXES.index("context"), -1)
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, sizes.context).tolist())
    return mine


@contextmanager
def single_process() -> Iterator[ProcessGroup]:
    """A group of one, for a run in this process only."""
    group = join(HashStore(), 0, Sizes(), timeout_s=60.0)
    try:
        yield group
    finally:
        leave()
