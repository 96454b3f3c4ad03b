"""Embeddings against the hidden states of transformers."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.actors.engine.families import save_family
from tests.actors.engine.tiny import VOCAB

from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.model.pooling import Pooling, groups, pooling_of
from raytide.actors.models.families import read_architecture
from raytide.core.errors import ConfigError


@pytest.fixture(scope="module", params=["qwen3-tied", "gemma2", "gpt2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    path = tmp_path_factory.mktemp(request.param)
    model = save_family(path, request.param)
    return ModelRunner(
        EngineConfig(model_dir=str(path), max_model_len=128, block_size=8), read_architecture(path)
    ), model


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.choice([1, 7, 8, 9, 40]))] for _ in range(count)]


def states_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_vectors_are_pooled_hidden_states(saved: tuple[ModelRunner, Any], pooling: Pooling) -> None:
    runner, model = saved
    whole = prompts(12)
    states = [states_of(model, prompt) for prompt in whole]
    expected = [{"cls": each[0], "last": each[-1], "mean": each.mean(0)}[pooling] for each in states]
    plain = runner.embed(whole, pooling, normalize=False)
    unit = runner.embed(whole, pooling)
    for want, vector, normal in zip(expected, plain, unit, strict=True):
        assert (torch.tensor(vector) - want).abs().max() < 1e-4
        assert (torch.tensor(normal) - want / want.norm()).abs().max() < 1e-5


def test_a_vector_does_not_depend_on_the_others_in_the_group(saved: tuple[ModelRunner, Any]) -> None:
    runner, whole = saved[0], prompts(6)
    together = torch.tensor(runner.embed(whole, "mean"))
    alone = torch.tensor([runner.embed([prompt], "mean")[0] for prompt in whole])
    assert torch.allclose(together, alone, atol=1e-5)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9)), st.integers(1, 12))
def test_groups_keep_all_prompts_in_order_and_within_the_bound(prompts: list[list[int]], bound: int) -> None:
    made = list(groups(prompts, bound))
    assert [prompt for group in made for prompt in group] == prompts
    assert all(len(group) == 1 or sum(map(len, group)) <= bound for group in made)
    assert all(sum(map(len, first)) + len(second[0]) > bound for first, second in itertools.pairwise(made))


def test_the_pooling_is_what_the_directory_says(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == "last"
    config = tmp_path / "1_Pooling" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}))
    assert pooling_of(tmp_path) == "mean"
    config.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigError, match="pooling_mode_max_tokens is not supported"):
        pooling_of(tmp_path)
