"""The shares of teams in the engine's steps, counted. A step takes 10 units of time, and one for each token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.actors.engine.life import sequence

from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.sequence import Sequence, StepPlan

SLOWDOWN = 1.15


def seconds(tokens: int) -> float:
    return 10.0 + tokens


def engine(
    slowdown: float | None = SLOWDOWN,
    *,
    num_blocks: int = 4000,
    max_running: int = 16,
    max_batch_tokens: int = 512,
    step_seconds: Callable[[int], float] = seconds,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, 4),
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        team_slowdown=slowdown,
        step_seconds=step_seconds,
    )


class Traffic:
    """Keeps `streams` requests of a heavy team at work, and counts the tokens of both teams."""

    def __init__(
        self, scheduler: Scheduler, streams: int, prompt: int = 16, answer: int = 200, **fields: object
    ) -> None:
        self.scheduler, self.streams = scheduler, streams
        self.alive: list[Sequence] = []
        self.prompt, self.answer, self.fields = prompt, answer, fields
        self.number = 0
        self.tokens = {"heavy": 0, "light": 0}
        self.plans: list[StepPlan] = []

    def new(self, team: str, prompt: int, answer: int, **fields: object) -> Sequence:
        self.number += 1
        seq = sequence(f"{team}{self.number}", [self.number] * prompt, answer, team=team, **fields)
        seq.stop_token_ids = frozenset()
        self.scheduler.add(seq)
        self.alive.append(seq)
        return seq

    def step(self) -> float:
        """Returns the time that the step takes."""
        present = sum(seq.team == "heavy" for seq in self.alive)
        for _ in range(self.streams - present):
            self.new("heavy", self.prompt, self.answer, **self.fields)
        plan = self.scheduler.plan()
        self.scheduler.commit(plan, {chunk.seq.seq_id: [4] for chunk in plan.chunks if chunk.yields_token})
        self.alive = [seq for seq in self.alive if seq.finish_reason is None]
        for chunk in plan.chunks:
            self.tokens[chunk.seq.team] += chunk.length
        self.plans.append(plan)
        return seconds(plan.num_tokens)

    def light_request(self, prompt: int = 16, answer: int = 20) -> float:
        """Returns the time of one request of the light team."""
        seq, took = self.new("light", prompt, answer), 0.0
        while seq.finish_reason is None:
            took += self.step()
        return took


def slowest_ratio(heavy: Traffic, prompt: int = 16, answer: int = 20) -> float:
    """Returns the slowest of 25 requests beside the heavy team, over one alone; between two, the engine is the heavy
    team's for three steps.
    """
    alone = Traffic(engine(), 0).light_request(prompt, answer)
    for _ in range(40):
        heavy.step()
    times = []
    for _ in range(25):
        times.append(heavy.light_request(prompt, answer))
        for _ in range(3):
            heavy.step()
    return max(times) / alone


@pytest.mark.parametrize("prompt", [16, 200])
def test_a_light_team_takes_at_most_a_quarter_longer_beside_many_decodes(prompt: int) -> None:
    assert slowest_ratio(Traffic(engine(), 15), prompt) <= 1.25
    assert slowest_ratio(Traffic(engine(None), 15), prompt) > 1.5


def test_a_light_team_takes_at_most_a_quarter_longer_beside_long_prompts() -> None:
    assert slowest_ratio(Traffic(engine(), 15, prompt=600, answer=4)) <= 1.25
    assert slowest_ratio(Traffic(engine(None), 15, prompt=600, answer=4)) > 5


def test_one_long_prompt_of_another_team_does_not_hold_up_a_decode() -> None:
    traffic = Traffic(engine(), 0)
    light = traffic.new("light", 4, 60)
    traffic.step()
    traffic.new("heavy", 3000, 1)
    lengths = [traffic.step() - seconds(1) for _ in range(50)]
    assert light.finish_reason is None
    assert sum(lengths) <= 50 * 0.15 * seconds(1) + 1
    traffic.step()
    while light.finish_reason is None:
        traffic.step()
    assert traffic.step() == seconds(512), "alone again, it has the whole step"


def test_the_heavy_team_gets_the_rest_of_the_bound_and_each_of_its_streams_a_turn() -> None:
    traffic = Traffic(engine(), 15, answer=2000)
    traffic.step()
    traffic.step()
    light = traffic.new("light", 4, 200)
    traffic.step()
    before = {seq.seq_id: len(seq.tokens) for seq in traffic.alive}
    for _ in range(180):
        traffic.step()
    gained = {seq.seq_id: len(seq.tokens) - before[seq.seq_id] for seq in traffic.alive}
    assert gained.pop(light.seq_id) == 180
    assert sum(gained.values()) == pytest.approx(180 * 0.15 * seconds(1), abs=2)
    assert max(gained.values()) - min(gained.values()) <= 1


def test_a_team_gets_no_fewer_tokens_than_a_lighter_one_by_weight() -> None:
    for weight in (1.0, 2.0):
        traffic = Traffic(engine(max_running=64), 50, answer=2000, weight=weight)
        traffic.step()
        traffic.step()
        for _ in range(6):
            traffic.new("light", 4, 200)
        traffic.step()
        traffic.tokens = {"heavy": 0, "light": 0}
        for _ in range(100):
            traffic.step()
        assert traffic.tokens == {"light": 600, "heavy": pytest.approx(600 * weight, abs=2)}


def test_teams_of_about_equal_load_are_not_bounded() -> None:
    traffic = Traffic(engine(), 8, answer=2000)
    traffic.step()
    for _ in range(6):
        traffic.new("light", 4, 100)
    traffic.step()
    traffic.step()
    assert traffic.plans[-1].num_tokens == 14


def test_more_urgent_requests_of_a_heavy_team_are_not_bounded() -> None:
    traffic = Traffic(engine(), 15, answer=2000, priority=-1)
    traffic.step()
    traffic.new("light", 4, 100)
    traffic.step()
    traffic.step()
    assert traffic.plans[-1].num_tokens == 16


def test_a_cheap_token_is_never_held_back() -> None:
    """Everybody is in every step where one takes as long for one token as for sixteen, as on a GPU."""
    traffic = Traffic(engine(step_seconds=lambda tokens: 1000.0 + tokens), 15, answer=2000)
    traffic.step()
    traffic.new("light", 4, 100)
    traffic.step()
    traffic.step()
    assert traffic.plans[-1].num_tokens == 16


def test_a_light_teams_prompt_goes_before_the_waiting_prompts_of_others() -> None:
    traffic = Traffic(engine(max_batch_tokens=64), 12, prompt=100)
    traffic.step()
    light = traffic.new("light", 40, 5)
    traffic.step()
    assert light.num_computed == 40


def test_waiting_sequences_of_the_heavy_team_start_beside_the_light_one() -> None:
    traffic = Traffic(engine(), 4, answer=4000)
    traffic.step()
    light = traffic.new("light", 4, 400)
    traffic.step()
    traffic.streams = 12
    for _ in range(300):
        traffic.step()
    assert light.finish_reason is None
    heavy = [seq for seq in traffic.scheduler.running if seq.team == "heavy"]
    assert len(heavy) == 12
    assert all(seq.output_len for seq in heavy)


def test_a_light_sequence_without_a_block_keeps_nobody_out() -> None:
    """It waits for what the heavy team holds, which is free the sooner the faster that ends."""
    traffic = Traffic(engine(num_blocks=32, max_running=8), 0)
    heavy = [traffic.new("heavy", 12, 4) for _ in range(6)]
    traffic.step()
    light = traffic.new("light", 20, 40)
    for _ in range(200):
        traffic.step()
    assert all(seq.finish_reason == "length" for seq in [*heavy, light])


def test_one_team_runs_as_if_there_were_no_bound() -> None:
    def run(slowdown: float | None) -> list[list[tuple[str, int, int]]]:
        traffic = Traffic(engine(slowdown, num_blocks=150), 20, prompt=30, answer=17)
        for _ in range(400):
            traffic.step()
        return [[(chunk.seq.seq_id, chunk.start, chunk.length) for chunk in plan.chunks] for plan in traffic.plans]

    assert run(SLOWDOWN) == run(None)
