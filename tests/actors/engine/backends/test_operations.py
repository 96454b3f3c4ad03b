"""Between two steps: sleep, other weights, moves that fail. No request is lost; no KV outlives what it came from."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.actors.engine.tiny import save_llama

from raytide.actors.engine import LLM, EngineConfig, GenRequest, SamplingParams
from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.actors.engine.sequence import StepPlan
from raytide.actors.models.content import WeightsSource
from raytide.core.errors import ConflictError, DataError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(40, 75))


def change(model_dir: Path, tensor: str = "model.layers.1.mlp.down_proj.weight", by: float = 0.5) -> None:
    path = model_dir / "model.safetensors"
    weights = load_file(path)
    weights[tensor] += by * weights[tensor].flip(0)
    save_file(weights, path.with_suffix(".new"), {"format": "pt"})
    path.with_suffix(".new").rename(path)


@pytest.fixture
def mine(model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change."""
    return shutil.copytree(model_dir, tmp_path / "mine")


@pytest.fixture
def other(mine: Path, tmp_path: Path) -> Path:
    path = shutil.copytree(mine, tmp_path / "other")
    change(path)
    return path


def start(model_dir: Path, **options: object) -> EngineCore:
    return EngineCore(EngineConfig.parse({"model_dir": str(model_dir), "block_size": 4, **options}, where="test"))


def add(loop: EngineCore, name: str = "r", prompt: list[int] = PROMPT, sampling: SamplingParams = GREEDY) -> None:
    loop.add(GenRequest(request_id=name, prompt=prompt, sampling=sampling), prompt)


def finish(loop: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while loop.has_work:
        for output in loop.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)  # type: ignore[union-attr]
    return tokens


def alone(model_dir: Path, prompt: list[int] = PROMPT, count: int = 12) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return LLM(model_dir, block_size=4).generate([prompt], sampling)[0].token_ids


def test_a_version_is_of_the_content_wherever_it_lies(mine: Path, other: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(mine, tmp_path / "copied")
    assert WeightsSource.at(copied).version == WeightsSource.at(mine).version
    assert WeightsSource.at(other).version != WeightsSource.at(mine).version
    assert WeightsSource.at(other, "step-9").version == "step-9"
    change(copied, "model.norm.weight", by=1e-6)
    assert WeightsSource.at(copied).version != WeightsSource.at(mine).version


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0[1, 2, 3"])
def test_a_damaged_file_has_no_version(mine: Path, damage: bytes) -> None:
    (mine / "model.safetensors").write_bytes(damage)
    with pytest.raises(DataError, match="cannot read"):
        WeightsSource.at(mine)


def test_sleep_gives_the_memory_back_and_wake_refuses_other_weights(mine: Path, tmp_path: Path) -> None:
    expected = alone(mine)
    loop = start(mine)
    add(loop)
    first = [token for output in loop.step() for token in output.token_ids]  # type: ignore[union-attr]
    operations.sleep(loop, 1)
    assert (loop.runner.cache.layers, loop.runner.has_weights, loop.stats().running) == ([], True, 0)
    operations.sleep(loop, 2)
    assert not loop.runner.has_weights
    backup = shutil.copytree(mine, tmp_path / "backup")
    change(mine)
    for _ in "again":
        with pytest.raises(ConflictError, match="no longer holds"):
            operations.wake(loop)
    assert loop.state == "asleep"
    shutil.copy(backup / "model.safetensors", mine / "model.safetensors")
    operations.wake(loop)
    assert first + finish(loop)["r"] == expected
    assert loop.stats().free_blocks == loop.stats().num_blocks


def test_weights_loaded_during_sleep_are_what_it_wakes_with(mine: Path, other: Path) -> None:
    loop = start(mine)
    operations.sleep(loop, 2)
    operations.use_weights(loop, *operations.read_weights(loop, str(other), None))
    change(mine)
    operations.wake(loop)
    add(loop)
    assert finish(loop)["r"] == alone(other)
    assert loop.info.weights_version == WeightsSource.at(other).version


def test_running_requests_go_on_with_the_new_weights_and_share_no_old_kv(mine: Path, other: Path) -> None:
    loop = start(mine)
    add(loop, "warms")
    finish(loop)
    add(loop)
    first: list[int] = []
    while len(first) < 5:
        first += [token for output in loop.step() for token in output.token_ids]  # type: ignore[union-attr]
    assert first == alone(mine)[: len(first)]
    operations.use_weights(loop, *operations.read_weights(loop, str(other), "v2"))
    assert operations.cached_prefix(loop, PROMPT, None, "") == 0
    assert finish(loop)["r"] == alone(other, PROMPT + first, 12 - len(first))
    assert operations.cached_prefix(loop, PROMPT, None, "") == 32


def test_weights_that_cannot_be_loaded_change_nothing(mine: Path, tmp_path: Path) -> None:
    loop = start(mine)
    add(loop)
    wider = tmp_path / "wider"
    save_llama(wider, intermediate_size=96)
    with pytest.raises(ConflictError, match="another architecture"):
        operations.read_weights(loop, str(wider), None)
    torn = shutil.copytree(mine, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((mine / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(DataError):
        operations.read_weights(loop, str(torn), None)
    assert finish(loop)["r"] == alone(mine)


def test_weights_that_change_while_they_are_read_are_refused_and_discarded(
    mine: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, discarded = start(mine), list[str]()
    load: Callable[[Path], PagedDecoder] = loop.runner.load

    def slow(model_dir: Path) -> PagedDecoder:
        model = load(model_dir)
        change(model_dir, by=0.25)
        monkeypatch.setattr(model, "discard", lambda: discarded.append(model_dir.name))
        return model

    monkeypatch.setattr(loop.runner, "load", slow)
    with pytest.raises(ConflictError, match="no longer holds"):
        operations.read_weights(loop, str(other), None)
    assert discarded == ["other"]


def test_blocks_that_cannot_be_moved_are_computed_again(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "swap_cost", lambda self: SwapCost(0.01))
    loop = start(mine, num_blocks=30, max_model_len=100, host_memory_gb=0.01)
    prompts = {f"r{i}": PROMPT[i:] for i in range(4)}
    for name, prompt in prompts.items():
        add(loop, name, prompt)
    move, broken = loop.runner.cache.move, iter([True, True])

    def sometimes(plan: StepPlan) -> None:
        if plan.swap_in and next(broken, False):
            raise RuntimeError("a copy failed")
        move(plan)

    monkeypatch.setattr(loop.runner.cache, "move", sometimes)
    assert finish(loop) == {name: alone(mine, prompt) for name, prompt in prompts.items()}
    assert loop.stats().failed == 0
    assert loop.stats().free_blocks == loop.stats().num_blocks
    assert len(list(broken)) < 2, "a move with content in it failed"


def test_moves_that_never_succeed_are_no_endless_loop(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = start(mine)
    add(loop)

    def never(plan: object) -> None:
        raise RuntimeError("a copy failed")

    monkeypatch.setattr(loop.runner.cache, "move", never)
    with pytest.raises(RuntimeError, match="a copy failed"):
        finish(loop)
    loop.fail_all(RuntimeError("given up"))
    assert loop.stats().free_blocks == loop.stats().num_blocks
