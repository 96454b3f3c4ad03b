"""A local shard stays where it is when it becomes a DTensor."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.distributed.local_shards import like, local, without_dim


def test_a_tensor_in_host_memory_stays_there_on_a_mesh_of_gpus() -> None:
    with process_group.single_process():
        mesh = DeviceMesh("cuda", [0], _init_backend=False)  # needs no GPU
        parameter = DTensor.from_local(torch.empty(4, 3, device="meta"), mesh, [Shard(0)], run_check=False)
        value = torch.arange(12.0).view(4, 3)
        assert local(like(value, parameter)).data_ptr() == value.data_ptr()
        assert local(without_dim(value[:, 0].clone(), parameter, 1)).device.type == "cpu"
