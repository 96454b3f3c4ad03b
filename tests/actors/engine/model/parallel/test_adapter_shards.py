"""Members that share a model compute an adapter as one process does, of every family that takes one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.actors.engine.families import save_family
from tests.actors.engine.model.parallel.test_shard import CPU, MAX_LEN, PLAIN, PROMPT
from tests.actors.engine.model.test_lora import ALL, write_adapter
from torch.distributed import HashStore

from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.actors.engine.model.input_batch import StepInputs
from raytide.actors.engine.model.lora import Adapter, LoraRows, read_adapter
from raytide.actors.engine.model.parallel.collectives import Collectives
from raytide.actors.engine.model.parallel.decoder import Computation, ShardedDecoder
from raytide.actors.engine.model.parallel.shard import ModelShard
from raytide.actors.engine.model.parallel.sharded_weights import AdapterShard
from raytide.actors.models.families import read_architecture
from raytide.actors.models.quantized.model_weights import open_weights
from raytide.kernels.core import PagedBatch
from raytide.kernels.registry import ops_for


def logits(model: PagedDecoder, adapter: Adapter) -> torch.Tensor:
    """Returns the logits of a prompt whose second half alone has the adapter."""
    tokens, half = len(PROMPT), len(PROMPT) // 2
    batch = PagedBatch([half, half], [half, half], torch.arange(2)[:, None], torch.tensor(PLACES), 32)
    positions_T = torch.arange(half).repeat(2)
    cache, loras = model.new_cache(2, 32), LoraRows([(adapter, half, tokens)])
    return model.forward(StepInputs(torch.tensor(PROMPT), positions_T, batch, torch.arange(tokens), loras), cache)


PLACES = [*range(len(PROMPT) // 2), *range(32, 32 + len(PROMPT) // 2)]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("family", ALL)
def test_two_members_compute_the_adapter_of_one(family: str, stages: int, tmp_path: Path) -> None:
    path = tmp_path / "model"
    model = save_family(path, family)
    adapter_dir = write_adapter(tmp_path / "adapter", model, ALL[family], rank=3)
    arch, ops = read_architecture(path), ops_for("cpu")
    whole = PagedDecoder(arch, open_weights(path, torch.float32, CPU), ops, MAX_LEN, PLAIN)
    expected = logits(whole, read_adapter(adapter_dir, arch, ops, torch.float32, CPU))
    plain = logits(whole, Adapter({}))
    half = len(PROMPT) // 2
    assert torch.equal(plain[:half], expected[:half])
    assert (plain[half:] - expected[half:]).abs().max() > 0.01
    store = HashStore()

    def compute(shard: ModelShard) -> torch.Tensor | None:
        torch.set_num_threads(1)
        group = Collectives(store, shard, CPU, own_host="127.0.0.1")
        own = ShardedDecoder(Computation(arch, ops, CPU, torch.float32, MAX_LEN, False, PLAIN), path, group)
        adapter = read_adapter(adapter_dir, arch, ops, torch.float32, CPU, AdapterShard(arch, group))
        if shard.stage == 0:
            return logits(own, adapter)
        with pytest.raises(AssertionError, match="has no head"):
            logits(own, adapter)
        return None

    with ThreadPoolExecutor(2 * stages) as threads:
        found, *_ = threads.map(compute, ModelShard.of_group(stages, 2))
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
