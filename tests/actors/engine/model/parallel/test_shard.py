"""Members that are threads here: the sum of the shards is the model, of every family, and each reads its part alone."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.actors.engine.families import FAMILIES, save_family
from torch.distributed import HashStore

from raytide.actors.engine.model.decoder import PagedDecoder, prompt_logits
from raytide.actors.engine.model.parallel.collectives import Collectives
from raytide.actors.engine.model.parallel.decoder import Computation, ShardedDecoder
from raytide.actors.engine.model.parallel.shard import ModelShard, check_divides
from raytide.actors.engine.model.parallel.sharded_weights import ShardedWeights
from raytide.actors.engine.model.weight_loader import QuantizedOptions
from raytide.actors.models.families import read_architecture
from raytide.actors.models.loader import Weights
from raytide.actors.models.quantized.model_weights import open_weights
from raytide.core.errors import ConfigError
from raytide.kernels.registry import ops_for

CPU = torch.device("cpu")
PROMPT = [5, 9, 17, 300, 41, 6, 77, 8] * 6
MAX_LEN = 64
PLAIN = QuantizedOptions()


def whole_logits(path: Path, options: QuantizedOptions = PLAIN) -> torch.Tensor:
    weights = open_weights(path, torch.float32, CPU)
    model = PagedDecoder(read_architecture(path), weights, ops_for("cpu"), MAX_LEN, options)
    return prompt_logits(model, PROMPT, 16, CPU)


def sharded_logits(
    path: Path, size: int, *, stages: int = 1, ordered: bool = False, options: QuantizedOptions = PLAIN
) -> torch.Tensor:
    store, arch = HashStore(), read_architecture(path)

    def compute(shard: ModelShard) -> torch.Tensor | None:
        torch.set_num_threads(1)
        group = Collectives(store, shard, CPU, own_host="127.0.0.1", ordered=ordered)
        computation = Computation(arch, ops_for("cpu"), CPU, torch.float32, MAX_LEN, ordered, options)
        model = ShardedDecoder(computation, path, group)
        if shard.stage == 0:
            return prompt_logits(model, PROMPT, 16, CPU)
        with pytest.raises(AssertionError, match="has no head"):  # it has computed its layers
            prompt_logits(model, PROMPT, 16, CPU)
        return None

    with ThreadPoolExecutor(size * stages) as threads:
        logits, *_ = threads.map(compute, ModelShard.of_group(stages, size))
    assert logits is not None
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_two_members_compute_the_logits_of_one(family: str, tmp_path: Path) -> None:
    save_family(tmp_path, family)
    torch.testing.assert_close(sharded_logits(tmp_path, 2), whole_logits(tmp_path), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_compute_the_logits_of_one_to_the_bit(family: str, tmp_path: Path) -> None:
    save_family(tmp_path, family)
    assert torch.equal(sharded_logits(tmp_path, 1, stages=2), whole_logits(tmp_path))


def test_two_stages_of_two_members_compute_the_logits_of_one(tmp_path: Path) -> None:
    save_family(tmp_path, "llama2-mha-untied-biased", num_hidden_layers=3)
    torch.testing.assert_close(sharded_logits(tmp_path, 2, stages=2), whole_logits(tmp_path), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ordered", [False, True])
def test_four_members_share_two_kv_heads_and_a_vocabulary_that_does_not_divide(tmp_path: Path, ordered: bool) -> None:
    save_family(tmp_path, "llama2-mha-untied-biased", num_key_value_heads=2, vocab_size=511, intermediate_size=97)
    found = sharded_logits(tmp_path, 4, ordered=ordered)
    assert found.shape == (len(PROMPT), 511)
    torch.testing.assert_close(found, whole_logits(tmp_path), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama-linear-tied", "gpt2", "phi3-longrope", "mixtral"])
def test_no_weight_that_is_cut_is_read_twice(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(tmp_path, family)
    arch, weights = read_architecture(tmp_path), Weights(tmp_path, torch.float32, CPU)
    read: dict[str, int] = {}
    part = Weights.part

    def counted(self: Weights, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        block = part(self, name, where)
        read[name] = read.get(name, 0) + block.numel()
        return block

    monkeypatch.setattr(Weights, "part", counted)
    for rank in range(2):
        shard = ModelShard(rank, 2)
        own = ShardedWeights(weights, arch, shard)
        PagedDecoder(shard.architecture(arch), own, ops_for("cpu"), MAX_LEN, QuantizedOptions())
    matrices = [name for name in weights.names if len(weights.shape(name)) > 1 and not re.search(r"wpe|gate\.w", name)]
    sizes = {name: math.prod(weights.shape(name)) for name in matrices}
    assert {name: read.get(name) for name in matrices} == sizes


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, True), (3, False), (4, True), (8, False)])
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_do(size: int, fits: bool, tmp_path: Path) -> None:
    save_family(tmp_path, "mistral-window")  # 4 heads, 2 of KV
    arch = read_architecture(tmp_path)
    if fits:
        check_divides(arch, size)
        return
    with pytest.raises(ConfigError, match="does not divide the model's 4 heads and 2 KV heads") as refused:
        check_divides(arch, size)
    assert refused.value.hint == "It may be 1, 2, 4."
