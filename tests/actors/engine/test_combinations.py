"""Every option of a request under every condition of the engine gives what it gives alone: the second table of
docs/engine.md, cell by cell.
"""

import re
from pathlib import Path

import pytest
from tests.actors.engine.tiny import VOCAB, save_adapter

from raytide.actors.engine import LLM, RequestOutput, SamplingParams
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.scheduler.preemption import SwapCost

PAGE = Path(__file__).resolve().parents[3] / "docs" / "engine.md"
PROMPTS = [[(11 * i + j) % (VOCAB - 1) + 1 for j in range(18 + 5 * i)] for i in range(5)]
COMMON = {"max_tokens": 14, "temperature": 0.8, "seed": 3, "ignore_eos": True}
REQUESTS: dict[str, dict[str, object]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "logit_bias": {"logit_bias": {7: 5.0}, "bad_words": ["e"]},
    "stop_strings": {"stop": ["qu", "##"], "min_tokens": 3},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "n": {"n": 3},
    "best_of": {"n": 1, "best_of": 3},
    "structured": {"structured": Structured("regex", "[a-z]{40}")},
    "lora": {},
}
SMALL = {"num_blocks": 26, "max_model_len": 100}
CONDITIONS: dict[str, dict[str, object]] = {
    "prefix cache": {},
    "chunks": {"max_batch_tokens": 9, "max_running": 9},
    "recompute": SMALL,
    "swap": SMALL | {"host_memory_gb": 0.02},
    "deterministic": SMALL | {"deterministic": True},
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter"))


def figures(answers: list[RequestOutput]) -> list[float]:
    """All log probabilities of the answers, in order."""
    chosen = [each for answer in answers for completion in answer.outputs for each in completion.logprobs or ()]
    prompt = [each for answer in answers for each in answer.prompt_logprobs or () if each is not None]
    return [each.logprob for each in chosen + prompt]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("kind", REQUESTS)
def test_an_option_gives_under_any_condition_what_it_gives_alone(
    kind: str, condition: str, model_dir: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "structured":
        pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")
    options = CONDITIONS[condition]
    sampling = SamplingParams(**(COMMON | REQUESTS[kind]))  # type: ignore[arg-type]
    plain = {"deterministic": True} if condition == "deterministic" else {}
    alone = LLM(model_dir, block_size=4, prefix_cache=False, **plain)
    monkeypatch.setattr(ModelRunner, "swap_cost", lambda self: SwapCost(0.01) if condition == "swap" else None)
    busy = LLM(model_dir, block_size=4, **options)
    lora = None
    if kind == "lora":
        lora = "tuned"
        alone.load_lora(lora, adapter)
        busy.load_lora(lora, adapter)
    expected = [alone.generate([prompt], sampling, lora=lora)[0] for prompt in PROMPTS]
    for _ in ("cold", "warm"):
        found = busy.generate(PROMPTS, sampling, lora=lora)
        assert [[each.token_ids for each in answer.outputs] for answer in found] == [
            [each.token_ids for each in answer.outputs] for answer in expected
        ]
        assert [answer.text for answer in found] == [answer.text for answer in expected]
        assert figures(found) == pytest.approx(figures(expected), abs=0 if condition == "deterministic" else 1e-4)
    stats = busy.stats()
    assert (stats.free_blocks, stats.failed) == (stats.num_blocks, 0)
    if "num_blocks" in options:
        assert stats.preemptions > 0
    elif kind != "prompt_logprobs":
        assert stats.cached_tokens > 0


def test_the_page_lists_these_cells() -> None:
    rows = re.findall(r"^\| `(\w+)` \|((?: tested \|)+)$", PAGE.read_text(), re.MULTILINE)
    assert {name: cells.count("tested") for name, cells in rows} == dict.fromkeys(REQUESTS, len(CONDITIONS))
