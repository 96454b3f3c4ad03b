"""Memory that is computed again or kept elsewhere is free, and the gradients are the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.actors.trainer.live_bytes import LiveBytes
from torch import Tensor, nn

from raytide.actors.models.families import architecture_of
from raytide.actors.trainer.hf.init_weights import initialise
from raytide.actors.trainer.model import activation_offload
from raytide.actors.trainer.model.activation_checkpointing import checkpoint_layer, compile_layer
from raytide.actors.trainer.model.activation_offload import DiskPool, HostPool
from raytide.actors.trainer.model.transformer import Transformer
from raytide.core.errors import ConfigError, StorageError
from raytide.core.specs.train import MemorySpec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
IDS = torch.arange(4 * 64).view(4, 64) % 61


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskPool]:
    with closing(DiskPool(1 << 30, str(tmp_path))) as pool:
        yield pool


def decoder(memory: MemorySpec, pool: activation_offload.ActivationPool | None = None) -> Transformer:
    model = Transformer(architecture_of(CONFIG, "test"), 64)
    initialise(model, 0)
    for layer in model.layers.values():
        checkpoint_layer(layer, memory)
        compile_layer(layer, memory)
        if pool is not None:
            activation_offload.offload(layer, pool, memory.offload_min_bytes)
    return model


def train_once(model: nn.Module) -> tuple[list[Tensor], int]:
    """The gradients, and the most bytes that were alive at once."""
    for _ in range(2):  # tables are made in the first pass
        model.zero_grad()
        with LiveBytes() as live:
            model(IDS, IDS).backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(grads) == len(list(model.parameters()))
    return grads, live.peak


@pytest.fixture(scope="module")
def plainly() -> tuple[list[Tensor], int]:
    return train_once(decoder(MemorySpec()))


def test_checkpointing_gives_equal_gradients_for_less_memory(plainly: tuple[list[Tensor], int]) -> None:
    wanted, most = plainly
    selective, some = train_once(decoder(MemorySpec(checkpointing="selective")))
    full, least = train_once(decoder(MemorySpec(checkpointing="full")))
    for grads in (selective, full):
        assert all(torch.equal(a, b) for a, b in zip(wanted, grads, strict=True))
    assert least < 0.55 * most
    assert least < some < 0.9 * most


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_activations_on_disk_are_out_of_memory_until_the_backward_pass(
    plainly: tuple[list[Tensor], int], tmp_path: Path, checkpointing: str
) -> None:
    memory = MemorySpec(activations="disk", scratch=str(tmp_path), offload_min_bytes=4096, checkpointing=checkpointing)  # type: ignore[arg-type]
    wanted, most = plainly
    pool = activation_offload.create_pool(memory)
    assert isinstance(pool, DiskPool)
    with closing(pool):
        grads, peak = train_once(decoder(memory, pool))
    assert all(torch.equal(a, b) for a, b in zip(wanted, grads, strict=True))
    assert peak < 0.6 * most
    if checkpointing == "full":  # only the layers' inputs are left to go
        assert pool.peak_bytes == 4 * 4 * 64 * 64 * 4
    assert pool.held_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_activations_in_host_memory_give_equal_gradients(plainly: tuple[list[Tensor], int]) -> None:
    pool = HostPool(1 << 30)
    grads, _ = train_once(decoder(MemorySpec(activations="cpu", offload_min_bytes=4096), pool))
    assert all(torch.equal(a, b) for a, b in zip(plainly[0], grads, strict=True))
    assert pool.peak_bytes > 1 << 20
    assert pool.held_bytes == 0


def test_a_full_pool_leaves_the_rest_on_the_device(plainly: tuple[list[Tensor], int], tmp_path: Path) -> None:
    with closing(DiskPool(300_000, str(tmp_path))) as pool:
        grads, _ = train_once(decoder(MemorySpec(activations="disk", offload_min_bytes=4096), pool))
    assert all(torch.equal(a, b) for a, b in zip(plainly[0], grads, strict=True))
    assert 200_000 < pool.peak_bytes <= 300_000


def test_a_step_that_breaks_off_gives_its_room_back(disk: DiskPool) -> None:
    model = decoder(MemorySpec(activations="disk", offload_min_bytes=4096), disk)
    loss = model(IDS, IDS)
    assert disk.held_bytes > 0
    del loss
    assert disk.held_bytes == 0
    first = disk._end
    model(IDS, IDS).backward()
    assert disk._end == first


def test_weights_and_small_tensors_stay(disk: DiskPool) -> None:
    layer = nn.Linear(64, 64, bias=False)
    activation_offload.offload(layer, disk, 4096)
    inputs = torch.randn(16, 64, requires_grad=True)
    kept = layer(inputs)
    assert disk.held_bytes == inputs.numel() * 4  # saved twice by name, kept once; the weight is not there
    kept.sum().backward()
    small = layer(torch.randn(2, 64, requires_grad=True))
    assert disk.held_bytes == 0
    assert small.shape == (2, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_was_away_comes_back_with_its_strides(disk: DiskPool, dtype: torch.dtype) -> None:
    for tensor in (
        torch.arange(24).view(2, 3, 4).to(dtype),
        torch.arange(24).view(2, 3, 4).to(dtype).transpose(0, 2),
        torch.arange(24).view(4, 6).to(dtype)[:, ::2],
        torch.zeros(0, 3, dtype=dtype),
    ):
        for slot in (disk.put(tensor), HostPool(1 << 20).put(tensor)):
            assert slot is not None
            assert torch.equal(slot.read(), tensor)
        back = disk.put(tensor)
        assert back is not None
        if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
            assert back.read().stride() == tensor.stride()


def test_a_disk_that_cannot_be_written_is_named(disk: DiskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(activation_offload.os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"):
        disk.put(torch.ones(8))
    assert disk.held_bytes == 0


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_layers_give_the_same_gradients(plainly: tuple[list[Tensor], int], checkpointing: str) -> None:
    memory = MemorySpec(compile=True, compile_backend="aot_eager", checkpointing=checkpointing)  # type: ignore[arg-type]
    model = decoder(memory)
    model(IDS, IDS).backward()
    for wanted, weight in zip(plainly[0], model.parameters(), strict=True):
        assert weight.grad is not None
        assert torch.allclose(wanted, weight.grad, rtol=1e-4, atol=1e-5)


def test_kept_results_and_offload_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="selective checkpointing"):
        MemorySpec.parse({"checkpointing": "selective", "activations": "disk"}, where="spec")
