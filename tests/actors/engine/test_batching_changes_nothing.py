"""The same request gives the same tokens, whatever runs beside it and however its work is cut."""

import random
from pathlib import Path

import pytest
from tests.actors.engine.tiny import VOCAB

from raytide.actors.engine import LLM, SamplingParams

RNG = random.Random(11)
PROMPTS = [[RNG.randrange(1, VOCAB) for _ in range(RNG.choice([1, 7, 16, 17, 40, 75]))] for _ in range(12)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    if index % 3 == 0
    else SamplingParams(temperature=0.8, top_p=0.9, top_k=40 * (index % 2), seed=index, max_tokens=20, ignore_eos=True)
    for index in range(len(PROMPTS))
]


def tokens_of(llm: LLM, order: list[int]) -> dict[int, list[int]]:
    answers = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    return {i: answer.outputs[0].token_ids for i, answer in zip(order, answers, strict=True)}


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> dict[int, list[int]]:
    llm = LLM(model_dir, block_size=16, prefix_cache=False)
    return {index: tokens_of(llm, [index])[index] for index in range(len(PROMPTS))}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched"),
        pytest.param({"block_size": 1}, id="blocks of one"),
        pytest.param({"max_batch_tokens": 7, "max_running": 5}, id="chunks of at most 7"),
        pytest.param({"max_batch_tokens": 33, "max_running": 32}, id="few left for prefill"),
        pytest.param({"max_running": 1}, id="one at a time"),
    ],
)
def test_tokens_do_not_depend_on_the_batch(
    options: dict[str, int], alone: dict[int, list[int]], model_dir: Path
) -> None:
    order = list(range(len(PROMPTS)))
    random.Random(len(options)).shuffle(order)
    assert tokens_of(LLM(model_dir, **({"block_size": 16} | options)), order) == alone


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_tokens_survive_preemption(prefix_cache: bool, alone: dict[int, list[int]], model_dir: Path) -> None:
    llm = LLM(model_dir, block_size=4, num_blocks=40, max_model_len=128, prefix_cache=prefix_cache)
    assert tokens_of(llm, list(range(len(PROMPTS)))) == alone
    stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.free_blocks == stats.num_blocks


def test_a_warm_prefix_cache_changes_only_the_work(alone: dict[int, list[int]], model_dir: Path) -> None:
    llm = LLM(model_dir, block_size=4)
    order = list(range(len(PROMPTS)))
    assert tokens_of(llm, order) == alone
    cold = llm.stats().cached_tokens
    assert tokens_of(llm, order) == alone
    expected = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    assert llm.stats().cached_tokens - cold == expected


def test_unseeded_requests_differ_and_an_engine_seed_repeats_them(model_dir: Path) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = [
        [answer.outputs[0].token_ids for answer in LLM(model_dir, seed=5).generate([[9, 9]] * 4, sampling)]
        for _ in "ab"
    ]
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4
