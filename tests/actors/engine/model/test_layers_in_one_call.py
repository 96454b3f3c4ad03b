"""The layers in one call of C compute what the operators compute one by one, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.actors.engine.families import FAMILIES, save_family
from tests.actors.models.quantized.quantized_models import save_quantized
from tests.actors.models.quantized.test_compressed_tensors import INT8, config_of, quantizer

from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.kernels import compiled

pytestmark = pytest.mark.skipif(not compiled.can_run(), reason="this machine has no C compiler")

PROMPTS = [[(11 * i + j) % 90 + 1 for j in range(3 + 17 * i)] for i in range(5)]
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
DENSE = [name for name in FAMILIES if "moe" not in name and name != "mixtral"]


def answers(model_dir: Path, monkeypatch: pytest.MonkeyPatch, in_one_call: bool | None, **options: Any) -> list[object]:
    """Returns tokens and log probabilities. Prompts are computed in chunks, beside tokens of other sequences. With None
    the layers must be unable to be one call.
    """
    found, build = [], PagedDecoder._pass_in_one_call

    def chosen(decoder: PagedDecoder) -> object:
        found.append(None if in_one_call is False else build(decoder))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(PagedDecoder, "_pass_in_one_call", chosen)
        llm = LLM(model_dir, block_size=4, max_batch_tokens=24, max_running=4, **options)
    assert [each is not None for each in found] == [bool(in_one_call)]
    return [each.outputs for each in llm.generate(PROMPTS, SAMPLED)]


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "deterministic": True, "kv_dtype": "int8"}])
@pytest.mark.parametrize("family", DENSE)
def test_families(family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(tmp_path, family)
    assert answers(tmp_path, monkeypatch, True, **options) == answers(tmp_path, monkeypatch, False, **options)


@pytest.mark.parametrize("options", [{"quantized_input": "float"}, {"quantized_input": "int8", "dtype": "bfloat16"}])
def test_parts_of_a_stack_in_formats_of_their_own(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    int4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
    config = config_of("mixed-precision", int4, {"format": "pack-quantized"})
    config["config_groups"]["group_1"] = {"targets": ["re:.*k_proj"], "weights": INT8, "format": "int-quantized"}
    four, eight = quantizer("pack-quantized", int4), quantizer("int-quantized", INT8)
    parts = iter([four, eight, four, four, four, four, four] * 3)  # q, k, v, o, gate, up, down of each layer
    save_quantized(tmp_path, lambda weight: next(parts)(weight), config)
    assert answers(tmp_path, monkeypatch, True, **options) == answers(tmp_path, monkeypatch, False, **options)


@pytest.mark.parametrize("operator", ["ATTENTION", "LINEAR", "NORM", "ACTIVATE_MUL"])
def test_a_forced_reference_is_not_passed_over(operator: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"RAYTIDE_OP_{operator}", "ref")
    answers(model_dir, monkeypatch, None)


def test_sparse_layers_are_computed_operator_by_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(tmp_path, "mixtral")
    answers(tmp_path, monkeypatch, None)
