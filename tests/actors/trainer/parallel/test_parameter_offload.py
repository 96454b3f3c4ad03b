"""Weights and gradients on a disk: no bit of a run changes, and a model larger than memory trains."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.actors.trainer.technique_ranks import runs
from tests.actors.trainer.trainer_ranks import PRELOAD

from raytide.actors.trainer.optim import state_offload
from raytide.actors.trainer.optim.state_offload import DiskStorage, is_mapped
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import ConfigError
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import MemorySpec, TrainSpec

RunRanks = Callable[..., list[Any]]
M_MMAP_THRESHOLD = -3
DISK = {"parameters": "disk", "optimizer": "disk"}


def with_(spec: TrainSpec, name: str, **changes: Any) -> TrainSpec:
    known = {key: value for key, value in spec.model_dump().items() if key not in changes}
    return TrainSpec.parse({**known, **changes, "out": f"{spec.out}-{name}"}, where=name)


@pytest.mark.parametrize("world", [1, 2])
def test_no_bit_of_a_run_depends_on_where_its_weights_are(spec: TrainSpec, run_ranks: RunRanks, world: int) -> None:
    wide = ModelSpec(dim=64, layers=3, heads=4, kv_heads=2, max_seq_len=64)  # weights of several pages
    spec = with_(spec, "base", steps=5, model=wide.model_dump())
    specs = {
        "device": spec,
        "disk": with_(spec, "disk", memory=DISK),
        "checkpointed": with_(spec, "checkpointed", memory={**DISK, "checkpointing": "full"}),
        "bf16": with_(spec, "bf16", precision="bf16"),
        "bf16-disk": with_(spec, "bf16-disk", precision="bf16", memory=DISK),
    }
    found = run_ranks(world, runs, specs)[0]
    assert found["disk"].losses == found["device"].losses
    assert found["checkpointed"].losses == pytest.approx(found["device"].losses, abs=5e-6)
    assert found["bf16-disk"].losses == found["bf16"].losses


def test_a_checkpoint_goes_on_wherever_the_weights_are(spec: TrainSpec) -> None:
    losses: list[float] = []
    train_local(with_(spec, "whole", steps=6), on_step=lambda result: losses.append(result.loss))
    here, there = with_(spec, "moved", steps=6), with_(spec, "moved", steps=3, memory=DISK)
    moved: list[float] = []
    train_local(there, on_step=lambda result: moved.append(result.loss))
    train_local(here, on_step=lambda result: moved.append(result.loss))
    assert moved == losses


def train_in(small: TrainSpec, spec: TrainSpec, spare_bytes: int, answer: str) -> None:
    """Trains with so much more memory than the process has, as the kernel counts it: files do not count. A run of a
    small model before that imports and allocates what every run does."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # freed memory goes back to the kernel
    torch.set_num_threads(1)
    train_local(small)
    status = Path("/proc/self/status").read_text()
    data = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + spare_bytes, resource.RLIM_INFINITY))
    losses: list[float] = []
    train_local(spec, on_step=lambda result: losses.append(result.loss))
    Path(answer).write_text(json.dumps(losses))


def test_a_model_of_twice_the_memory_trains_from_the_disk(spec: TrainSpec, tmp_path: Path) -> None:
    """Its states have 340 MB, of which 200 MB fit."""
    large = ModelSpec(dim=384, layers=12, heads=4, kv_heads=4, max_seq_len=64)
    spec = with_(spec, "large", steps=2, model=large.model_dump(), global_batch=2, micro_batch=1)
    multiprocessing.set_forkserver_preload(PRELOAD)
    context = multiprocessing.get_context("forkserver")
    ended = {}
    for name, memory, spare in (("unlimited", {}, 1 << 40), ("device", {}, 200 << 20), ("disk", DISK, 200 << 20)):
        each = with_(spec, name, memory={**memory, "scratch": str(tmp_path)})
        small = with_(each, "small", model={**large.model_dump(), "dim": 64, "layers": 2})
        process = context.Process(target=train_in, args=(small, each, spare, str(tmp_path / name)))
        process.start()
        process.join(300.0)
        ended[name] = process.exitcode
    assert ended["device"] != 0, "the limit is real"
    assert (ended["unlimited"], ended["disk"]) == (0, 0)
    assert json.loads((tmp_path / "disk").read_text()) == json.loads((tmp_path / "unlimited").read_text())


def test_what_is_released_keeps_its_values_and_small_tensors_stay_in_memory(tmp_path: Path) -> None:
    storage = DiskStorage(str(tmp_path))
    large, small = storage.empty((100, 100), torch.float32), storage.empty((3,), torch.float32)
    large.copy_(torch.arange(10_000.0).view(100, 100))
    assert (is_mapped(large), is_mapped(small)) == (True, False)
    for tensor in (large, small):
        state_offload.release(tensor)
        state_offload.read_ahead(tensor)
    assert torch.equal(large, torch.arange(10_000.0).view(100, 100))
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_options_that_do_not_go_with_it_are_refused(spec: TrainSpec) -> None:
    with pytest.raises(ValidationError, match="only with the optimizer state"):
        MemorySpec(parameters="disk")
    for layout in ({"tensor": 2}, {"pipeline": 2}, {"zero": 2}):
        with pytest.raises(ConfigError, match=r"needs layout\.zero 3"):
            with_(spec, "refused", memory=DISK, layout=layout)
    with pytest.raises(ConfigError, match='"cpu" frees no memory'):
        train_local(with_(spec, "cpu", memory={"parameters": "cpu", "optimizer": "cpu"}))
