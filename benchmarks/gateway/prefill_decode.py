"""Compares two ways to use two replicas: one for prefill and one for decode, or both for everything (chunked prefill).

    python benchmarks/gateway/prefill_decode.py [--shares 0.15 0.35] [--seconds 30] [--rounds 5]

Each side has two native engines (a Llama shape of 28M random weights in fp32) in processes of their own, with one
thread each. In front of the engines is the gateway's router, which runs in this process on the same cores. A side
`both-N` has two ordinary replicas whose steps compute at most N tokens (512 is the default on CPUs). In the side
`split`, one replica computes the long prompts and hands their KV to the other.

`--chats` chats (short prompts, 64 new tokens) run at any time. Long prompts of `--long` tokens, with 16 new tokens
each, arrive at random times. Within a round, these times are the same for all sides. The rate of the long prompts is
such that their computation takes the given share of both engines' time. To find this rate, the benchmark first
measures the time of one long prompt without other work.

The sides take turns. Prints medians over the rounds, with quartiles: the chats' tokens a second, the 50th and the
99th percentile of the time between the chats' tokens, and the time to the first token of the long prompts. Also
prints the median rate, in prompt tokens a second, at which long prompts were computed within the round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))

from engine_cpu import SHAPES, save_model
from overhead import HOST, in_turn, spread

from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import GenRequest
from raytide.actors.serving.engine_child import EngineChild
from raytide.actors.serving.ray_serve.keys import ReplicaAddress
from raytide.core.objects.endpoint import ServeSpec
from raytide.gateway.replicas.prefill_pool import PrefillPool
from raytide.gateway.replicas.replica_set import ReplicaSet
from raytide.gateway.replicas.routed_engine import RoutedEngine

BATCH_TOKENS = {"both-512": 512, "both-128": 128, "split": 512}
MIN_HANDED_OVER = 256
CHAT_TOKENS, LONG_TOKENS = 64, 16
WARM_S, WAIT_S = 2.0, 60.0


class Pair:
    """One of the compared sides: two engines behind a router."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.children: list[EngineChild] = []
        self.replicas, self._prefill = ReplicaSet(name), ReplicaSet(f"{name}-prefill")
        self.engine = RoutedEngine(self.replicas)

    async def start(self, model: str, max_len: int) -> None:
        engine = {"kind": "native", "dtype": "float32", "max_model_len": max_len, "max_running": 64}
        engine |= {"max_batch_tokens": BATCH_TOKENS[self.name], "kv_memory_gb": 1.0, "prefix_cache": False}
        spec = ServeSpec.model_validate({"name": "m", "model": model, "engine": engine})
        for at in range(2):
            self.children.append(await EngineChild.start(spec, HOST, f"r{at}", model_dir=model))
        addresses = [ReplicaAddress(HOST, child.port, child.secret) for child in self.children]
        if self.name == "split":
            self._prefill.update({"prefill": addresses.pop()})
            await self._prefill.wait_ready(WAIT_S)
            self.engine.prefill = PrefillPool(self._prefill, MIN_HANDED_OVER)
        self.replicas.update({f"r{at}": address for at, address in enumerate(addresses)})
        async with asyncio.timeout(WAIT_S):
            while len(self.replicas.ready) < len(addresses):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def prompt_tokens(self) -> list[float]:
        """Returns the prompt tokens that each engine has computed so far."""
        return [child.engine.status.load["prompt_tokens"] for child in self.children]

    async def stop(self) -> None:
        await self.replicas.close()
        await self._prefill.close()
        for child in self.children:
            await child.stop(0.0)


@dataclass
class Seen:
    """The measurements of one round on one side. A side is a pair of engines behind a router."""

    chat_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """The times to the first token of long prompts."""
    long_done: int = 0
    """The long prompts whose first token came within the round."""


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(1, 4000) for _ in range(tokens)]


def request(name: str, tokens: list[int], new_tokens: int) -> GenRequest:
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return GenRequest(request_id=name, prompt=tokens, sampling=sampling)


async def load(pair: Pair, args: argparse.Namespace, long_per_s: float, seed: int) -> Seen:
    """Sends chats and long prompts to one pair of engines for one round. Returns the observations made after the first
    two seconds.
    """
    seen, rng, began_s = Seen(), random.Random(seed), time.perf_counter()
    from_s, until_s = began_s + WARM_S, began_s + WARM_S + args.seconds

    async def chats(client: int) -> None:
        own, number = random.Random(f"{seed} {client}"), 0
        while time.perf_counter() < until_s:
            number += 1
            last_s = 0.0
            chat = request(f"c{client}-{number}", prompt(own, own.randint(16, 64)), CHAT_TOKENS)
            async for chunk in pair.engine.generate(chat):
                now_s = time.perf_counter()
                if from_s <= now_s < until_s:
                    seen.chat_tokens += len(chunk.token_ids)
                    if last_s:
                        seen.gaps_s.append(now_s - last_s)
                last_s = now_s

    async def long(number: int, at_s: float, tokens: list[int]) -> None:
        await asyncio.sleep(at_s - time.perf_counter())
        is_first = True
        async for _ in pair.engine.generate(request(f"l{number}", tokens, LONG_TOKENS)):
            now_s = time.perf_counter()
            if is_first and now_s >= from_s:
                seen.first_s.append(now_s - at_s)
                seen.long_done += now_s < until_s
            is_first = False

    arrivals, at_s = list[float](), began_s + rng.expovariate(long_per_s)
    while at_s < until_s:
        arrivals.append(at_s)
        at_s += rng.expovariate(long_per_s)
    long_ones = [long(number, at_s, prompt(rng, args.long)) for number, at_s in enumerate(arrivals)]
    async with asyncio.timeout(args.seconds + 10 * WAIT_S):
        await asyncio.gather(*(chats(client) for client in range(args.chats)), *long_ones)
    return seen


async def seconds_of_long(pair: Pair, args: argparse.Namespace) -> float:
    """Returns the seconds that one engine needs for a long prompt without other work. It is the median of five
    measurements.
    """
    seconds = list[float]()
    for number in range(6):  # the first one warms up
        began_s = time.perf_counter()
        async for _ in pair.children[0].engine.generate(
            request(f"alone{number}", prompt(random.Random(number), args.long), 1)
        ):
            pass
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[1:])


async def compare(pairs: Sequence[Pair], args: argparse.Namespace) -> None:
    alone_s = await seconds_of_long(pairs[0], args)
    print(f"a prompt of {args.long} tokens takes one engine {1e3 * alone_s:.0f} ms alone; {args.chats} chats")
    print(
        f"{'share':>6} {'side':>9} {'chat tok/s':>10} {'quartiles':>16} {'p50 ms':>7} {'p99 ms':>7} {'quartiles':>16}",
        end="",
    )
    print(f" {'first ms':>9} {'quartiles':>16} {'prompt tok/s':>13}")
    for share in args.shares:
        rounds: dict[str, list[Seen]] = {pair.name: [] for pair in pairs}
        for turn in range(args.rounds):
            for pair in in_turn(pairs, turn):
                rounds[pair.name].append(await load(pair, args, 2 * share / alone_s, turn))
        for name, seen in rounds.items():
            if not all(each.gaps_s and each.first_s for each in seen):
                sys.exit(f"{name}: a round saw no chat, or no long prompt: raise --seconds, --chats or --shares")
            gaps_ms = [sorted(1e3 * gap_s for gap_s in each.gaps_s) for each in seen]
            p99 = spread([gaps[int(0.99 * len(gaps))] for gaps in gaps_ms], "7.1f")
            rates = spread([each.chat_tokens / args.seconds for each in seen], "10.0f")
            firsts = spread([1e3 * statistics.median(each.first_s) for each in seen], "9.0f")
            done = statistics.median(each.long_done * args.long / args.seconds for each in seen)
            p50 = statistics.median(statistics.median(gaps) for gaps in gaps_ms)
            print(f"{share:>6} {name:>9} {rates} {p50:>7.1f} {p99} {firsts} {done:>13.0f}", flush=True)


async def run(args: argparse.Namespace) -> None:
    pairs = [Pair(name) for name in args.sides]
    with tempfile.TemporaryDirectory() as model:
        save_model(Path(model), SHAPES["28M"], "float32", max_positions=2 * args.long)
        try:
            for pair in pairs:
                await pair.start(model, 2 * args.long)
            await compare(pairs, args)
            await asyncio.sleep(1.0)  # for the last status
            for pair in pairs:
                print(
                    f"{pair.name}: prompt tokens by engine: {', '.join(f'{each:.0f}' for each in pair.prompt_tokens())}"
                )
        finally:
            for pair in pairs:
                with suppress(TimeoutError):
                    await pair.stop()
    print(f"load of the machine over the last minute: {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.15, 0.35], help="of both engines, for prompts")
    parser.add_argument("--sides", choices=BATCH_TOKENS, nargs="+", default=list(BATCH_TOKENS))
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--long", type=int, default=1800, help="tokens of a long prompt")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
