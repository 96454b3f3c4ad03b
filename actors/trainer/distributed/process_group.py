"""The process group of one generation of ranks, and the collectives that the training loop needs.

When the gang changes, a process leaves its group and joins the next group without a restart. Starting a process costs
10 s of imports. Joining a group costs less than one second.
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
"""The least timeout of the groups for checkpoints."""
STALL_MARGIN_S = 60.0
"""The seconds by which this timeout exceeds `stall_timeout_s`, so that the driver names the rank that stalls."""
STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    rank: int
    world: int
    device: torch.device
    sizes: Sizes
    mesh: DeviceMesh
    """Axes pipeline, replicate, shard, tensor. Context ranks are part of "shard", because they shard the weights."""
    io: dist.ProcessGroup
    """A gloo group for checkpoints, with a long timeout, so that a hung step is still noticed quickly."""
    context: dist.ProcessGroup | None = None
    """The ranks that share this rank's sequences; None if there is only one."""
    generation: int = 0
    """The generation of the gang."""
    io_timeout_s: float = IO_TIMEOUT_S
    """The timeout of `io` and of the channels."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh over which FSDP shards and replicates."""
        return self.mesh["replicate", "shard"] if self.sizes.replicate > 1 else self.mesh["shard"]

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The group of ranks that hold copies of this rank's shards."""
        return self.mesh.get_group("replicate")

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of the global batch."""
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
        """The number of ranks over which FSDP averages gradients. The trainer multiplies gradients by this number,
        because the trainer needs sums instead of means.
        """
        return self.sizes.data * self.sizes.context

    @property
    def is_data_first(self) -> bool:
        """True on exactly one of the ranks that share a part of the global batch. This rank reports for the part."""
        return self.tensor_rank == self.context_rank == self.pipeline_rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sum of each value over the ranks, in fp64."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        summed: list[float] = totals.tolist()
        return summed

    def from_first(self, value: T) -> T:
        """Returns rank 0's value on every rank. The value is sent over a group with a long timeout, because rank 0 may
        be busy with files.
        """
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.io)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks as a list, in the order of ranks."""
        values = [value] * self.world
        dist.all_gather_object(values, value, group=self.io)
        return values

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank, waits for all ranks, and returns this rank's result. If `work` raises a
        RaytideError on one rank, all ranks raise it. A long timeout applies while a rank waits for the others.
        """
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
        """Returns a new gloo group of all ranks for a background thread. Two threads must not share a gloo group.

        The ranks of a new group meet at the store. A rank that waits there does not notice that a peer has died.
        Therefore all ranks first wait for each other in an existing group.
        """
        dist.barrier(group=self.io)
        channel = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.io_timeout_s))
        assert isinstance(channel, dist.ProcessGroup)
        return channel


def create_store(address: str, world: int) -> TCPStore:
    """Opens a rendezvous store for `world` ranks on a free port. The store lives as long as the returned object."""
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
    stall_timeout_s: float = 0.0,
) -> ProcessGroup:
    """Joins the process group whose ranks meet at `store`. `address` is this rank's own address. A rank on a loopback
    address uses the loopback interface, so that gloo does not resolve the host name.
    """
    if address.startswith("127."):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cuda = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=sizes.world, timeout=timeout)
    return _joined(sizes, timeout_s, generation, stall_timeout_s)


def adopt(layout: Parallelism, *, timeout_s: float, stall_timeout_s: float = 0.0) -> ProcessGroup:
    """Returns a ProcessGroup for a torch process group that other code, such as Ray Train, made and will destroy. All
    ranks get a role in the layout, so that there are no spares.
    """
    world = dist.get_world_size()
    sizes = layout.sizes(world)
    if sizes.world != world:
        raise ConfigError(
            f"{world} workers do not fit a layout of {sizes}.", hint=f"Start {sizes.world} workers, or change layout."
        )
    return _joined(sizes, timeout_s, 0, stall_timeout_s)


def leave() -> None:
    """Leaves the group, even if the group is broken. This closes the group's sockets, which wakes peers that wait for
    this rank.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    torch_compat.count_groups_from_zero()
    torch_compat.forget_meshes()


def _joined(sizes: Sizes, timeout_s: float, generation: int, stall_timeout_s: float) -> ProcessGroup:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch_compat.tell_meshes_apart()
    shape = (sizes.pipeline, sizes.replicate, sizes.shard * sizes.context, sizes.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    io_timeout_s = max(timeout_s, IO_TIMEOUT_S, stall_timeout_s + STALL_MARGIN_S)
    io = dist.new_group(backend="gloo", timeout=timedelta(seconds=io_timeout_s))
    assert isinstance(io, dist.ProcessGroup)
    context = _context(sizes)
    return ProcessGroup(dist.get_rank(), sizes.world, device, sizes, mesh, io, context, generation, io_timeout_s)


def _context(sizes: Sizes) -> dist.ProcessGroup | None:
    """Creates the groups of context ranks and returns this rank's, None without context parallelism. torch requires
    every rank to create all groups.
    """
    if sizes.context == 1:
        return None
    ranks = torch.arange(sizes.world).view(sizes.shape).movedim(AXES.index("context"), -1)
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, sizes.context).tolist())
    return mine


@contextmanager
def single_process() -> Iterator[ProcessGroup]:
    """Yields a process group of one rank, for a run in this process."""
    group = join(HashStore(), 0, Sizes(), timeout_s=60.0)
    try:
        yield group
    finally:
        leave()
