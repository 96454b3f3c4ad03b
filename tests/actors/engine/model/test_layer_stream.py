"""Models larger than the memory for their weights give the tokens of those that are kept, to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.actors.engine.tiny import save_adapter, save_llama
from tests.actors.models.quantized.gguf.gguf_files import save_gguf
from tests.actors.models.quantized.quantized_models import save_quantized
from tests.actors.models.quantized.test_engine_options import INT8, int8
from tests.actors.models.quantized.test_packed_formats import gptq, gptq_config

from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.model.layer_stream import StreamedLayers
from raytide.actors.engine.model.weight_loader import WeightLoader
from raytide.actors.engine.types import RequestOutput
from raytide.core.errors import ConfigError, DataError

LAYERS = 16
PROMPTS = ["import os", "def main(", "class Tide:\n    def", "for x in range("]
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=6, logprobs=1)


def save_plain(folder: Path) -> Path:
    save_llama(folder, max_shard_size="200KB", num_hidden_layers=LAYERS)
    return folder


def save_int8(folder: Path) -> Path:
    save_quantized(folder, int8, INT8, num_hidden_layers=LAYERS)
    return folder


def save_gptq(folder: Path) -> Path:
    quantize = gptq(4, 32, True, version=1)
    save_quantized(folder, quantize, gptq_config(4, 32), num_hidden_layers=LAYERS)
    return folder


def save_packed(folder: Path) -> Path:
    pytest.importorskip("gguf", reason="llama.cpp's gguf package writes the file")
    save_gguf(folder / "m.gguf", save_llama(folder, num_hidden_layers=LAYERS, head_dim=16), "Q8_0")
    return folder / "m.gguf"


def answers(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SAMPLED] * len(PROMPTS))


def values(results: list[RequestOutput]) -> list[object]:
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in results]


@pytest.mark.parametrize("save", [save_plain, save_int8, save_gptq, save_packed])
def test_answers_are_those_of_weights_that_are_kept(save: Callable[[Path], Path], tmp_path: Path) -> None:
    """With chunks, evictions and drafts; before and after it has slept, and with other weights."""
    model = save(tmp_path)
    small = {"max_batch_tokens": 16, "max_running": 4, "block_size": 8, "num_blocks": 14, "speculation": "ngram"}
    kept, streamed = (
        LLM(model, weights_memory_gb=each, deterministic=True, **small)  # type: ignore[arg-type]
        for each in (None, 0.0012 if save is save_plain else 0.00055)
    )
    assert kept.info.streamed_layers == 0
    assert 0 < streamed.info.streamed_layers <= LAYERS
    expected = values(answers(kept))
    assert values(answers(streamed)) == expected
    assert torch.equal(streamed.logits([5, 6, 7, 8]), kept.logits([5, 6, 7, 8]))
    assert streamed.embed(PROMPTS) == kept.embed(PROMPTS)
    assert streamed.info.quantization == kept.info.quantization


def test_adapters_are_added_to_streamed_layers_of_another_dtype_than_the_files(tmp_path: Path) -> None:
    kept, streamed = (LLM(save_plain(tmp_path), weights_memory_gb=each, dtype="bfloat16") for each in (None, 0.0012))
    assert 0 < streamed.info.streamed_layers < LAYERS
    for llm in (kept, streamed):
        llm.load_lora("a", save_adapter(tmp_path / "adapter"))
    first, second = (
        [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, lora="a")] for llm in (kept, streamed)
    )
    assert first == second
    assert second != [each.outputs[0].token_ids for each in streamed.generate(PROMPTS, GREEDY)]


def test_no_more_than_the_limit_is_kept(tmp_path: Path) -> None:
    """As many layers stay as fit beside the two in flight, and all of them where they do."""
    save_plain(tmp_path)
    size, embedding = 4 * (64 * 128 + 64 * 64 + 3 * 64 * 160), 4 * 512 * 64
    scratch = 2 * 4 * 2 * 160 * 64
    for stay in (0, 1, 5):
        limit = 2 * embedding + (stay + 2) * size + scratch
        assert LLM(tmp_path, weights_memory_gb=(limit + 1000) / 1e9).info.streamed_layers == LAYERS - stay
    with pytest.raises(ConfigError, match=r"too little for this model: .* take 0\.00077 GB") as refused:
        LLM(tmp_path, weights_memory_gb=(2 * embedding + 2 * size + scratch - 1000) / 1e9)
    assert "Give 0.00085 or more" in refused.value.hint
    whole = (2 * embedding + LAYERS * size + 1000) / 1e9
    assert LLM(tmp_path, weights_memory_gb=whole).info.streamed_layers == 0


def test_a_pass_that_ends_early_leaves_the_next_one_whole(tmp_path: Path) -> None:
    layers = LLM(save_plain(tmp_path), weights_memory_gb=0.0012)._core.runner._loaded._layers
    assert isinstance(layers, StreamedLayers)
    built = layers._build.layer(3).input_norm.weight
    for _ in range(2):
        for index, layer in enumerate(layers):
            if index == 3:
                assert torch.equal(layer.input_norm.weight, built)
                break
    assert sum(1 for _ in layers) == LAYERS


def test_a_layer_is_read_while_the_one_before_it_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = LLM(save_plain(tmp_path), weights_memory_gb=0.0012)._core.runner._loaded._layers
    assert isinstance(layers, StreamedLayers)
    begun, build = list[int](), WeightLoader.layer
    monkeypatch.setattr(WeightLoader, "layer", lambda self, index: (begun.append(index), build(self, index))[1])
    first = LAYERS - layers.num_streamed
    for index, _ in enumerate(layers):
        if index >= first:
            following = index + 1 if index + 1 < LAYERS else first
            assert layers._ahead is not None
            layers._ahead[1].result(60)
            assert begun[-1] == following


def test_a_file_that_changes_while_it_is_read_ends_requests_with_an_error(tmp_path: Path) -> None:
    llm = LLM(save_plain(tmp_path), weights_memory_gb=0.0012)
    before = values(answers(llm))
    for path in tmp_path.glob("*.safetensors"):
        save_file(load_file(path), tmp_path / "fresh", {"format": "pt"})
        os.replace(tmp_path / "fresh", path)  # as exports do: what was opened stays
    assert values(answers(llm)) == before
    llm = LLM(tmp_path, weights_memory_gb=0.0012)
    for path in tmp_path.glob("*.safetensors"):
        with open(path, "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\0")
    with pytest.raises(DataError, match="the file has been changed since the model was loaded"):
        llm.logits([5, 6, 7])


def test_several_processes_hold_their_parts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights_memory_gb is for one process"):
        EngineConfig.parse({"model_dir": ".", "weights_memory_gb": 1, "tensor_parallel": 2}, where="test")
