"""Routes a part of a trace to three native engines in processes of their own, as `routing.py --real` asks for.

The requests are those of the sessions with the most turns. The engines (a Llama shape of 28M random weights) have
one thread each and small KV caches. Each policy starts with new processes. A simulation of the same requests is
printed beside the measurement. It uses the step times that were measured on one engine without other work. It does
not model that the three engines share the cores of this machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from engine_cpu import SHAPES, save_model
from prefix_cache import BLOCK, Recorded, endless
from routing import REPLICAS, STATUS_S, Counting, Policy, Routing, Speed, simulate
from routing import Replica as SimulatedReplica

from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import GenRequest
from raytide.actors.serving.engine_child import EngineChild
from raytide.actors.serving.ray_serve.keys import ReplicaAddress
from raytide.core.objects.endpoint import ServeSpec
from raytide.gateway.replicas.replica_set import ReplicaSet
from raytide.gateway.replicas.routed_engine import RoutedEngine
from raytide.gateway.replicas.routing.router import ReplicaState, Route, Router

HOST = "127.0.0.1"
MAX_TOKENS, COUNT = 1000, 200
KV_SHARE = 0.5
DURATION_S = 70.0


class PowerOfTwo(Router):
    """The baseline: chooses two random replicas, and from these the one with fewer requests."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    def route(self, prompt: Sequence[int], replicas: Sequence[ReplicaState], **options: object) -> Route:
        def held(each: ReplicaState) -> int:
            own = self._assigned.get(each.name)
            return max(each.running + each.waiting, len(own.in_flight) if own else 0)

        return super().route(prompt, [min(self._random.sample(list(replicas), 2), key=held)])


def compare(requests: Sequence[Recorded]) -> None:
    """Prints the hit rate and the time to the first token of both policies, measured and simulated."""
    chosen = _busiest([each for each in requests if len(each.prompt) + each.output_len < MAX_TOKENS])
    best, distinct = endless(chosen)
    num_blocks = max(200, int(distinct * KV_SHARE / REPLICAS))
    tokens = sum(len(each.prompt) for each in chosen)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), SHAPES["28M"], "float32")
        speed = asyncio.run(_speed(folder))
        start_s = chosen[0].arrival_s
        stretch = DURATION_S / (chosen[-1].arrival_s - start_s)
        chosen = [
            Recorded((each.arrival_s - start_s) * stretch, _tokens(each.prompt), each.output_len) for each in chosen
        ]
        print(f"{len(chosen)} requests with {tokens} prompt tokens in {chosen[-1].arrival_s:.0f} s, ", end="")
        print(f"{num_blocks} blocks in a replica; a cache without end finds {best:.1%}")
        print(f"one engine alone: {speed.step_s * 1e3:.1f} ms a step, {speed.prefill_s * 1e6:.0f} us a token")
        print(f"{'policy':>14}{'hits':>8}{'mean TTFT s':>13}{'median':>9}{'simulated':>12}{'TTFT s':>9}")
        kinds: list[tuple[str, Router, Policy]] = [
            ("power of two", PowerOfTwo(), Counting(0)),
            ("routed", Router(), Routing(0)),
        ]
        for name, router, policy in kinds:
            hits, first_s = asyncio.run(_replay(folder, num_blocks, chosen, router))
            replicas = [SimulatedReplica(f"r{at}", num_blocks, speed) for at in range(REPLICAS)]
            guess = simulate(chosen, [policy], replicas, 1.0, 0)
            print(
                f"{name:>14}{hits:>8.1%}{statistics.fmean(first_s):>13.3f}{statistics.median(first_s):>9.3f}"
                f"{guess.hit_rate:>12.1%}{guess.mean_s:>9.3f}",
                flush=True,
            )


def _busiest(requests: Sequence[Recorded]) -> list[Recorded]:
    """Returns the requests of the sessions with the most turns, by their first block, as they arrived."""
    turns = Counter(each.prompt[0] for each in requests)
    sessions = [first for first, _ in turns.most_common(COUNT)]
    kept = set[int]()
    while sum(turns[first] for first in kept) < COUNT:
        kept.add(sessions.pop(0))
    return [each for each in requests if each.prompt[0] in kept]


def _tokens(prompt: Sequence[int]) -> list[int]:
    """Returns tokens of the small vocabulary, equal for equal blocks."""
    return [random.Random(token).randrange(1, 4000) for token in prompt]


def _spec(folder: str, num_blocks: int) -> ServeSpec:
    engine = {"kind": "native", "block_size": BLOCK, "num_blocks": num_blocks, "max_model_len": 1024}
    return ServeSpec(name="bench", model=folder, engine=engine)


async def _speed(folder: str) -> Speed:
    """Returns the step times of one engine without other work, each the median of nine."""
    child = await EngineChild.start(_spec(folder, 1000), HOST, "alone", model_dir=folder)
    rng = random.Random(0)

    async def seconds(name: str, length: int, output: int) -> float:
        prompt = [rng.randrange(1, 4000) for _ in range(length)]
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        began_s = time.perf_counter()
        async for _ in child.engine.generate(GenRequest(request_id=name, prompt=prompt, sampling=sampling)):
            pass
        return time.perf_counter() - began_s

    try:
        await seconds("warm", 800, 8)
        long = statistics.median([await seconds(f"l{at}", 900, 1) for at in range(9)])
        short = statistics.median([await seconds(f"s{at}", 100, 1) for at in range(9)])
        decode = statistics.median([await seconds(f"d{at}", 100, 33) for at in range(9)])
    finally:
        await child.stop(0.0)
    prefill_s = (long - short) / 800
    return Speed((decode - short) / 32, prefill_s, 0.0)


async def _replay(
    folder: str, num_blocks: int, requests: Sequence[Recorded], router: Router
) -> tuple[float, list[float]]:
    """Returns the share of prompt tokens from caches, and the times to the first tokens."""
    spec = _spec(folder, num_blocks)
    children = [await EngineChild.start(spec, HOST, f"r{at}", model_dir=spec.model) for at in range(REPLICAS)]
    replicas = ReplicaSet("bench")
    replicas.router = router
    try:
        replicas.update({f"r{at}": ReplicaAddress(HOST, child.port, child.secret) for at, child in enumerate(children)})
        while len(replicas.ready) < REPLICAS:  # noqa: ASYNC110
            await asyncio.sleep(STATUS_S)
        engine, first_s, cached = RoutedEngine(replicas), list[float](), list[int]()

        async def ask(at: int, request: Recorded, start_s: float) -> None:
            due_s = start_s + request.arrival_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            sampling = SamplingParams(max_tokens=request.output_len, ignore_eos=True)
            got_first = False
            async for chunk in engine.generate(
                GenRequest(request_id=f"{at}", prompt=request.prompt, sampling=sampling)
            ):
                if not got_first:
                    got_first = True
                    first_s.append(time.perf_counter() - due_s)
                if chunk.usage is not None:
                    cached.append(chunk.usage.cached_tokens)

        start_s = time.perf_counter() + 1.0
        await asyncio.gather(*(ask(at, request, start_s) for at, request in enumerate(requests)))
        assert len(cached) == len(requests)
        return sum(cached) / sum(len(each.prompt) for each in requests), first_s
    finally:
        await replicas.close()
        for child in children:
            await child.stop(0.0)
