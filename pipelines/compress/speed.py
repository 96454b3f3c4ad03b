"""Measures the decoding speed of a model and of its parent with the native engine. Within one run, the two models are
measured alternately.
"""

from __future__ import annotations

import time
from pathlib import Path

from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.sequence import ScheduledChunk, Sequence
from raytide.actors.models.families import read_architecture

_CONCURRENCIES = (1, 8)
_PROMPT, _STEPS, _ROUNDS = 32, 16, 3


def measure_decoding(parent: Path, model: Path) -> dict[str, float]:
    """Returns decoded tokens per second, as `parent_c1`, `model_c1` and so on. The number after `c` is the number of
    concurrent sequences.

    Each value is the best of three rounds. Each round measures both models, and their order alternates. Logits are
    computed, but no token is sampled.
    """
    runners = {"parent": _runner(parent), "model": _runner(model)}
    best: dict[str, float] = {}
    for turn in range(_ROUNDS):
        for name in sorted(runners, reverse=turn % 2 == 1):
            for count in _CONCURRENCIES:
                key = f"{name}_c{count}"
                best[key] = max(best.get(key, 0.0), _tokens_per_s(runners[name], count))
    return best


def _runner(folder: Path) -> ModelRunner:
    arch = read_architecture(folder)
    length = min(arch.max_model_len, _PROMPT + _STEPS + 2)
    config = EngineConfig(
        model_dir=str(folder), dtype="auto", max_model_len=length, max_running=max(_CONCURRENCIES), prefix_cache=False
    )
    return ModelRunner(config, arch)


def _tokens_per_s(runner: ModelRunner, count: int) -> float:
    blocks = -(-runner.max_len // runner.block_size)
    prompt = max(1, min(_PROMPT, runner.max_len - _STEPS - 2))
    steps = min(_STEPS, runner.max_len - prompt - 2)
    running = []
    for index in range(count):
        seq = Sequence(f"{index}", [1] * prompt, prompt, SamplingParams(), runner.max_len, frozenset(), 0)
        seq.block_ids += range(index * blocks, (index + 1) * blocks)
        running.append(seq)
    try:
        runner.logits([ScheduledChunk(seq, 0, prompt) for seq in running])
        _step(runner, running)
        began = time.perf_counter()
        for _ in range(steps):
            _step(runner, running)
        return count * steps / (time.perf_counter() - began)
    finally:
        for seq in running:
            runner.release(seq)


def _step(runner: ModelRunner, running: list[Sequence]) -> None:
    for seq in running:
        seq.tokens.append(1)
    runner.logits([ScheduledChunk(seq, len(seq.tokens) - 1, 1) for seq in running]).cpu()
