"""Measures routing by prefix and load on a recorded day: prefix hits, and the time to the first token.

    python benchmarks/gateway/routing.py TRACE.jsonl [--rows 0:1996] [--loads 0.5,0.8] [--real]
    python benchmarks/gateway/routing.py --mix hot

TRACE is in Mooncake's format. All lengths are divided by 32, as in benchmarks/engine/prefix_cache.py. With `--mix`,
the requests are generated instead. The mixes are: all prompts are distinct, all are equal, or half of them share one
prefix.

Each replica is simulated with the production scheduler and block pool. A step takes `--step-ms`, plus a constant for
each token of prefill and decode. The gateway's own router is used, in one gateway process or in two. With two
processes, each gets a random half of the requests. Every 0.25 s, the replicas push a report to each gateway. With
two gateways, the replicas also push a report 20 ms after a request. The report contains statistics. It also contains
the prefixes of the requests that the other gateway has sent. At a load of 1, the replicas would be just busy if
their caches were unlimited.

Three baselines run on the same requests: power of two choices (by requests in flight), least loaded, and one engine
with the memory and speed of all replicas. With several seeds, prints the mean, the least and the greatest result.

With `--real`, `real_replicas.py` then routes a part of the trace to three native engines in processes of their own.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from prefix_cache import BLOCK, Recorded, endless, read, sequence

from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.sequence import Sequence as Sample
from raytide.actors.engine.sequence import StepPlan
from raytide.gateway.replicas.routing.prefix_index import join_keys
from raytide.gateway.replicas.routing.router import ReplicaState, Route, Router

STATUS_S, NEWS_S = 0.25, 0.02
REPLICAS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """The time of a step: a constant, plus a time for each token of prefill and of decode."""

    step_s: float
    prefill_s: float
    decode_s: float

    def seconds(self, plan: StepPlan) -> float:
        prefill = sum(chunk.length for chunk in plan.chunks if chunk.start < chunk.seq.prompt_len)
        return self.step_s + self.prefill_s * prefill + self.decode_s * (plan.num_tokens - prefill)

    def times(self, factor: float) -> Speed:
        return Speed(self.step_s / factor, self.prefill_s / factor, self.decode_s / factor)


class Replica:
    def __init__(self, name: str, num_blocks: int, speed: Speed) -> None:
        self.name, self.speed = name, speed
        self.scheduler = Scheduler(BlockPool(num_blocks, BLOCK), max_running=64, max_batch_tokens=2048)
        self.plan: StepPlan | None = None
        self.pending: dict[str, int] = {}
        """The new tokens of each request without a first token."""
        self.state = self.report()
        self.has_news = False
        self.sent: list[tuple[Policy, bytes]] = []

    def tell(self, gateways: Sequence[Policy]) -> None:
        """Pushes the replica's statistics to all gateways. Also tells each gateway which prefixes the other gateways
        have sent to this replica.
        """
        self.state, self.has_news = self.report(), False
        for gateway in gateways:
            gateway.add_report(self.name, sum(self.pending.values()))
        for sender, prefix in self.sent:
            for gateway in gateways:
                if gateway is not sender:
                    gateway.add_prefix(self.name, prefix)
        self.sent = []

    def report(self) -> ReplicaState:
        pool = self.scheduler.pool
        return ReplicaState(
            self.name,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_kv_tokens=pool.num_free * BLOCK,
            cache_tokens=pool.num_blocks * BLOCK,
        )


class Policy:
    """Chooses replicas for the requests that one gateway receives."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, request: Recorded, replicas: Sequence[Replica]) -> str:
        raise NotImplementedError

    def sent(self, name: str, replica: str) -> None:
        """Records that the request `name` was sent to the replica that was chosen last."""

    def prefix(self) -> bytes:
        """Returns the prefix keys of the request that was sent last. The other gateways are told these keys."""
        return b""

    def new_tokens(self) -> int:
        """Returns the number of uncached tokens in the request that was sent last."""
        return 0

    def first_token(self, name: str) -> None:
        """Records that a request of this gateway got its first token."""

    def end(self, name: str, sample: Sample) -> None:
        """Records that a request of this gateway has ended."""

    def add_prefix(self, replica: str, prefix: bytes) -> None:
        """Records the prefix of another gateway's request, as a replica reported it."""

    def add_report(self, replica: str, pending_tokens: int) -> None:
        """Records a replica's report. `pending_tokens` is the number of uncached prompt tokens in those requests on the
        replica that have no first token yet.
        """


class Counting(Policy):
    """Samples some replicas at random, and chooses the one with the fewest requests. A sample of two replicas gives the
    policy "power of two choices". A sample of all replicas gives the policy "least loaded". The gateway counts its own
    requests as soon as it sends them.
    """

    def __init__(self, seed: int, choices: int = 2) -> None:
        super().__init__(seed)
        self._choices = choices
        self._own: dict[str, int] = {}
        self._at: dict[str, str] = {}

    def choose(self, request: Recorded, replicas: Sequence[Replica]) -> str:
        some = self.random.sample(list(replicas), min(self._choices, len(replicas)))
        return min(
            some, key=lambda each: max(each.state.running + each.state.waiting, self._own.get(each.name, 0))
        ).name

    def sent(self, name: str, replica: str) -> None:
        self._at[name] = replica
        self._own[replica] = self._own.get(replica, 0) + 1

    def end(self, name: str, sample: Sample) -> None:
        self._own[self._at.pop(name)] -= 1


class Routing(Policy):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.router = Router()
        self._routes: dict[str, Route] = {}
        self._route: Route | None = None

    def choose(self, request: Recorded, replicas: Sequence[Replica]) -> str:
        self._route = self.router.route(request.prompt, [each.state for each in replicas])
        return self._route.replica

    def sent(self, name: str, replica: str) -> None:
        assert self._route is not None
        self._routes[name] = self._route

    def prefix(self) -> bytes:
        assert self._route is not None
        return join_keys(self._route.keys)

    def new_tokens(self) -> int:
        assert self._route is not None
        return self._route.new_tokens

    def first_token(self, name: str) -> None:
        self._routes[name].first_token()

    def end(self, name: str, sample: Sample) -> None:
        self._routes.pop(name).end(cached_tokens=sample.num_cached, tokens=sample.tokens[:-1])

    def add_prefix(self, replica: str, prefix: bytes) -> None:
        self.router.add_prefix(replica, prefix)

    def add_report(self, replica: str, pending_tokens: int) -> None:
        self.router.add_report(replica, pending_tokens)


@dataclass(slots=True)
class Result:
    hit_rate: float
    first_token_s: list[float] = field(default_factory=list)
    served: list[int] = field(default_factory=list)

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.first_token_s)


def simulate(
    requests: Sequence[Recorded], gateways: Sequence[Policy], replicas: Sequence[Replica], stretch: float, seed: int
) -> Result:
    """Replays the requests, with all arrivals `stretch` times as far apart as recorded."""
    rng = random.Random(seed)
    events: list[tuple[float, int, str, int]] = []
    for index, request in enumerate(requests):
        heapq.heappush(events, (request.arrival_s * stretch, index, "arrival", index))
    count = len(requests)
    heapq.heappush(events, (0.0, count, "status", 0))
    samples: dict[str, Sample] = {}
    senders: dict[str, Policy] = {}
    arrivals: dict[str, float] = {}
    waiting_first: set[str] = set()
    result = Result(0.0, served=[0] * len(replicas))
    index_of = {each.name: at for at, each in enumerate(replicas)}

    def begin(at: int, now_s: float) -> None:
        nonlocal count
        replica = replicas[at]
        replica.plan = replica.scheduler.plan(now_s)
        count += 1
        heapq.heappush(events, (now_s + replica.speed.seconds(replica.plan), count, "step", at))

    left = len(requests)
    while left:
        now_s, _, kind, at = heapq.heappop(events)
        if kind == "status":
            for each in replicas:
                each.tell(gateways)
            count += 1
            heapq.heappush(events, (now_s + STATUS_S, count, "status", 0))
        elif kind == "news":
            replicas[at].tell(gateways)
        elif kind == "arrival":
            request, name = requests[at], f"{at}"
            gateway = rng.choice(gateways)
            chosen = gateway.choose(request, replicas)
            gateway.sent(name, chosen)
            samples[name] = sequence(name, request.prompt, request.output_len, now_s)
            senders[name], arrivals[name] = gateway, now_s
            waiting_first.add(name)
            replica = replicas[index_of[chosen]]
            replica.sent.append((gateway, gateway.prefix()))
            replica.pending[name] = gateway.new_tokens()
            if len(gateways) > 1 and not replica.has_news:
                replica.has_news = True
                count += 1
                heapq.heappush(events, (now_s + NEWS_S, count, "news", index_of[chosen]))
            result.served[index_of[chosen]] += 1
            replica.scheduler.add(samples[name])
            if replica.plan is None:
                begin(index_of[chosen], now_s)
        else:
            replica = replicas[at]
            plan, replica.plan = replica.plan, None
            assert plan is not None
            yielded = [chunk.seq for chunk in plan.chunks if chunk.yields_token]
            replica.scheduler.commit(plan, {sample.seq_id: [-1] for sample in yielded})
            for sample in yielded:
                if sample.seq_id in waiting_first:
                    waiting_first.discard(sample.seq_id)
                    del replica.pending[sample.seq_id]
                    result.first_token_s.append(now_s - arrivals[sample.seq_id])
                    senders[sample.seq_id].first_token(sample.seq_id)
                if sample.finish_reason is not None:
                    senders[sample.seq_id].end(sample.seq_id, sample)
                    left -= 1
            if replica.scheduler.has_work:
                begin(at, now_s)
    total = sum(len(request.prompt) for request in requests)
    result.hit_rate = sum(sample.num_cached for sample in samples.values()) / total
    return result


def stretch_for(load: float, requests: Sequence[Recorded], speed: Speed) -> float:
    """Returns the factor by which to stretch the recorded times. With this factor, the replicas have the load `load` if
    their caches are unlimited.
    """
    found, _ = endless(list(requests))
    prompts = sum(len(request.prompt) for request in requests)
    decodes = sum(request.output_len for request in requests)
    # A step's constant is shared by what is computed in it: counted for prefills of 512 tokens and decodes of 8.
    work_s = prompts * (1 - found) * (speed.prefill_s + speed.step_s / 512) + decodes * (
        speed.decode_s + speed.step_s / 8
    )
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return work_s / REPLICAS / load / span_s


def made_up(mix: str, count: int = 1500) -> list[Recorded]:
    """Returns requests with prompts of 496 tokens, at random times (seed 0), one a second on average."""
    rng, requests, now_s = random.Random(0), list[Recorded](), 0.0
    for at in range(count):
        now_s += rng.expovariate(1.0)
        shared = {"distinct": 0, "equal": 31, "hot": 24 if at % 2 else 0}[mix]
        blocks = [*range(shared), *range(100 * at + 1000, 100 * at + 1031 - shared)]
        tokens = [token for each in blocks for token in range(each * BLOCK, (each + 1) * BLOCK)]
        requests.append(Recorded(now_s, tokens, rng.randint(2, 16)))
    return requests


POLICIES: dict[str, Callable[[int], Policy]] = {
    "power of two": Counting,
    "least loaded": lambda seed: Counting(seed, REPLICAS),
    "routed": Routing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--mix", choices=("distinct", "equal", "hot"))
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--rows", default="0:", help="the part of the trace, as first:end")
    parser.add_argument("--loads", default="0.3,0.6,0.9")
    parser.add_argument("--gateways", default="1,2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kv-share", type=float, default=0.5, help="of the distinct blocks, in all replicas together")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--prefill-us", type=float, default=250.0, help="for each token")
    parser.add_argument("--decode-us", type=float, default=400.0, help="for each token")
    options = parser.parse_args()
    first, _, end = options.rows.partition(":")
    if options.mix:
        requests = made_up(options.mix)
    else:
        requests = list(read(options.trace, 1 << 30))[int(first or 0) : int(end) if end else None]
    start_s = requests[0].arrival_s
    requests = [Recorded(each.arrival_s - start_s, each.prompt, each.output_len) for each in requests]
    speed = Speed(options.step_ms / 1e3, options.prefill_us / 1e6, options.decode_us / 1e6)
    best, distinct = endless(requests)
    num_blocks = max(2000, int(distinct * options.kv_share / REPLICAS))
    if options.real:
        from real_replicas import compare

        compare(requests)
        return
    print(f"{len(requests)} requests, {distinct} distinct blocks, {num_blocks} in a replica; ", end="")
    print(f"a cache without end finds {best:.1%}")
    print(
        f"{'load':>6}{'gateways':>10}{'policy':>14}{'hits':>8}{'of one cache':>14}{'mean TTFT s':>13}{'spread':>16}",
        end="",
    )
    print(f"{'p99 s':>8}{'against po2':>13}{'busiest':>9}")
    for load in map(float, options.loads.split(",")):
        stretch = stretch_for(load, requests, speed)
        one = simulate(
            requests, [Counting(0)], [Replica("one", REPLICAS * num_blocks, speed.times(REPLICAS))], stretch, 0
        )
        print(f"{load:>6.1f}{'':>10}{'one engine':>14}{one.hit_rate:>8.1%}{1:>14.1%}{one.mean_s:>13.3f}")
        for gateways in map(int, options.gateways.split(",")):
            base = 0.0
            for name, make in POLICIES.items():
                runs = []
                for seed in range(options.seeds):
                    policies = [make(10 * seed + at) for at in range(gateways)]
                    replicas = [Replica(f"r{at}-{seed}", num_blocks, speed) for at in range(REPLICAS)]
                    runs.append(simulate(requests, policies, replicas, stretch, seed))
                means = [each.mean_s for each in runs]
                mean, hits = statistics.fmean(means), statistics.fmean(each.hit_rate for each in runs)
                base = base or mean
                late = statistics.fmean(
                    sorted(each.first_token_s)[int(0.99 * len(each.first_token_s))] for each in runs
                )
                busiest = max(max(each.served) / sum(each.served) for each in runs)
                print(
                    f"{load:>6.1f}{gateways:>10}{name:>14}{hits:>8.1%}{hits / (one.hit_rate or 1):>14.1%}{mean:>13.3f}"
                    f"{f'{min(means):.3f} to {max(means):.3f}':>16}{late:>8.2f}{base / mean:>13.2f}{busiest:>9.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
