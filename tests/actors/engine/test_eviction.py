"""At a full engine a request of higher priority goes first, and those that make room for it lose time, but no token."""

from pathlib import Path

import pytest
from tests.actors.engine.tiny import VOCAB

from raytide.actors.engine import LLM, EngineConfig, GenRequest, SamplingParams
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.actors.engine.sequence import StepPlan

LOW = [[(7 * i + j) % (VOCAB - 1) + 1 for j in range(20 + i)] for i in range(6)]
HIGH = list(range(200, 260))
BUDGET = 16


def sampling(index: int) -> SamplingParams:
    if index % 2:
        return SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return SamplingParams(temperature=0.9, seed=index, max_tokens=40, ignore_eos=True, presence_penalty=0.5)


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[list[int]]:
    llm = LLM(model_dir, block_size=4)
    return [llm.generate([LOW[i]], sampling(i))[0].token_ids for i in range(len(LOW))] + [
        llm.generate([HIGH], sampling(1))[0].token_ids
    ]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that swapped something."""
    found: list[StepPlan] = []
    start = EngineCore.__init__

    def watched(self: EngineCore, config: EngineConfig) -> None:
        start(self, config)
        move = self.runner.cache.move

        def note(plan: StepPlan) -> None:
            found.extend([plan] if plan.swap_out or plan.swap_in else [])
            move(plan)

        monkeypatch.setattr(self.runner.cache, "move", note)

    monkeypatch.setattr(EngineCore, "__init__", watched)
    return found


@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_a_high_priority_request_goes_first_and_nobody_loses_a_token(
    how: str, model_dir: Path, alone: list[list[int]], moves: list[StepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "swap_cost", lambda self: SwapCost(0.01) if how == "swap" else None)
    fields = {"model_dir": str(model_dir), "block_size": 4, "num_blocks": 46, "max_model_len": 110, "max_running": 6}
    loop = EngineCore(EngineConfig.parse(fields | {"max_batch_tokens": BUDGET, "host_memory_gb": 0.01}, where="test"))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(7)}

    def step() -> None:
        for output in loop.step():
            tokens[output.request_id] += output.token_ids  # type: ignore[union-attr]

    for i, prompt in enumerate(LOW):
        loop.add(GenRequest(request_id=str(i), prompt=prompt, sampling=sampling(i), priority=5), prompt)
    while loop.stats().waiting or not all(tokens[str(i)] for i in range(6)):
        step()
    assert loop.stats().running == 6, "full"
    loop.add(GenRequest(request_id="6", prompt=HIGH, sampling=sampling(1), priority=0), HIGH)
    took = 0
    while not tokens["6"]:
        step()
        took += 1
    prefill = -(-len(HIGH) // BUDGET)
    assert prefill <= took <= prefill + 2
    assert loop.stats().preemptions > 0
    while loop.has_work:
        step()
    assert list(tokens.values()) == alone
    assert any(plan.swap_out for plan in moves) == any(plan.swap_in for plan in moves) == (how == "swap")
    stats = loop.stats()
    assert (stats.free_blocks, stats.failed) == (stats.num_blocks, 0)


def test_everybody_ends_with_the_same_tokens_however_often_they_are_swapped(
    model_dir: Path, alone: list[list[int]], moves: list[StepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "swap_cost", lambda self: SwapCost(0.01))
    llm = LLM(model_dir, block_size=4, num_blocks=30, max_model_len=110, host_memory_gb=0.01, max_batch_tokens=64)
    answers = llm.generate([*LOW, HIGH], [*(sampling(i) for i in range(6)), sampling(1)])
    assert [answer.token_ids for answer in answers] == alone
    assert llm.stats().preemptions > 0
    assert any(plan.swap_in for plan in moves)


@pytest.mark.parametrize("pools", [False, True])
def test_ctrl_c_before_the_moves_of_a_step_leaves_no_wrong_prefix(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, pools: bool
) -> None:
    monkeypatch.setattr(ModelRunner, "swap_cost", lambda self: SwapCost(0.01))
    llm = LLM(model_dir, block_size=4, num_blocks=30, max_model_len=110, host_memory_gb=0.01)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first, second = list(range(40, 120)), list(range(140, 220))

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    expected = llm.generate([first], greedy)[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(llm._core.runner.cache, "move", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = llm.embed([second]) if pools else llm.generate([second], greedy)
    assert llm.generate([first], greedy)[0].token_ids == expected
    assert llm.stats().free_blocks == llm.stats().num_blocks
