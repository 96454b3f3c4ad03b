"""Measures how much a heavy team slows down a light team that shares an engine with it.

    python benchmarks/gateway/fair_tenants.py [--streams 64] [--requests 100] [--rounds 3]
                                              [--real [--slowdown 1.15]]

There are two gateway processes and one engine process, as `raytide up` starts them. The requests carry API keys of
two teams. A small control API in this script tells the gateways these keys. The heavy team keeps `--streams`
requests of `--heavy-tokens` tokens open, half of them through each gateway. The light team asks for `--light-tokens`
tokens, one request after another. The engine is a fake one with 16 places that yields `--rate` tokens a second for
each place. With --real, the engine is the native one with random weights, and its option `team_slowdown` is set to
`--slowdown`. The value "off" switches off the sharing of steps among teams.

In each round, the light team is measured first alone and then beside the heavy team. For the light team, prints the
mean and the 99th percentile of two times: the time to the first token, and the whole time. For each of the two
times, also prints the ratio of the 99th percentiles (beside / alone). The last figures are the tokens a second of
both teams together, and of the heavy team alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_cpu import SHAPES, save_model
from overhead import HOST, free_port, gateways, process

PLACES = 16
SECRETS = {"heavy": "rk-" + "h" * 43, "light": "rk-" + "l" * 43}
CONTROL = """
import hashlib, sys, uvicorn
from fastapi import FastAPI
from raytide.core.objects.api_key import ApiKey, KeyTableChange
app = FastAPI()
keys = {}
for pair in sys.argv[2:]:
    team, secret = pair.split("=")
    digest = hashlib.sha256(secret.encode()).hexdigest()
    keys[digest] = ApiKey(id=team, name=team, team=team, user="", account=team)
@app.get("/v1/gateway/keys")
async def table(newer_than: int, timeout_s: float):
    import asyncio
    await asyncio.sleep(timeout_s)
    return KeyTableChange(0, newer_than < 0, keys if newer_than < 0 else {}, {}, {})
@app.post("/v1/gateway/usage")
async def usage(): return {}
@app.get("/v1/models")
async def ready(): return {}
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


async def stream(http: httpx.AsyncClient, port: int, team: str, tokens: int, number: int) -> tuple[float, float, int]:
    """Returns the seconds to the first token, the seconds to the last token, and the number of tokens."""
    prompt = [1 + (number >> shift) % 64 for shift in range(16)]
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    body |= {"seed": number, "stream_options": {"include_usage": True}}
    headers = {"authorization": f"Bearer {SECRETS[team]}"}
    began_s, first_s, usage = time.perf_counter(), 0.0, 0
    async with http.stream("POST", f"http://{HOST}:{port}/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                usage = (event.get("usage") or {}).get("completion_tokens", usage)
                if not first_s and event["choices"]:
                    first_s = time.perf_counter() - began_s
    return first_s, time.perf_counter() - began_s, usage


async def ready(http: httpx.AsyncClient, port: int) -> None:
    """Waits until the gateway knows the keys and the replica."""
    problem: Exception | None = None
    for _ in range(200):
        try:
            await stream(http, port, "light", 1, 0)
            return
        except (httpx.HTTPError, RuntimeError) as error:
            problem = error
            await asyncio.sleep(0.1)
    raise TimeoutError(str(problem))


@asynccontextmanager
async def flood(http: httpx.AsyncClient, ports: Sequence[int], streams: int, tokens: int) -> AsyncIterator[None]:
    async def endless(number: int) -> None:
        while True:
            number += streams
            await stream(http, ports[number % len(ports)], "heavy", tokens, number)

    tasks = [asyncio.create_task(endless(number)) for number in range(streams)]
    try:
        yield
    finally:
        done = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()


async def generated(http: httpx.AsyncClient, page: str) -> float:
    """Returns the number of tokens that the engine has generated so far, including those of unfinished streams."""
    text = (await http.get(f"http://{page}/metrics")).raise_for_status().text
    rows = (line.split() for line in text.splitlines() if line.startswith("raytide_generated_tokens_total"))
    return sum(float(row[-1]) for row in rows)


async def light(http: httpx.AsyncClient, ports: Sequence[int], args: argparse.Namespace) -> list[tuple[float, float]]:
    found = []
    for number in range(args.requests):
        first_s, whole_s, _ = await stream(http, ports[number % 2], "light", args.light_tokens, 10**6 + number)
        found.append((first_s, whole_s))
    return found


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


async def measure(args: argparse.Namespace, ports: Sequence[int], page: str) -> None:
    alone: list[tuple[float, float]] = []
    beside: list[tuple[float, float]] = []
    rates: dict[str, list[float]] = {"heavy alone": [], "both": []}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:

        async def rate_of(name: str, began_s: float, before: float) -> None:
            tokens = await generated(http, page) - before
            rates[name].append(tokens / (time.perf_counter() - began_s))

        for port in ports:
            await ready(http, port)
        for _ in range(args.rounds):
            alone += await light(http, ports, args)
            async with flood(http, ports, args.streams, args.heavy_tokens):
                await asyncio.sleep(args.warm_s)
                began_s, before = time.perf_counter(), await generated(http, page)
                await asyncio.sleep(args.warm_s)
                await rate_of("heavy alone", began_s, before)
                began_s, before = time.perf_counter(), await generated(http, page)
                beside += await light(http, ports, args)
                await rate_of("both", began_s, before)
    print(f"{len(alone)} requests of the light team, ms   {'mean':>8} {'p99':>8}")
    for what, place in (("first token", 0), ("whole time", 1)):
        for name, times in (("alone", alone), ("beside", beside)):
            values = [1e3 * each[place] for each in times]
            print(f"{what + ', ' + name:<36} {statistics.mean(values):>8.1f} {p99(values):>8.1f}")
        ratio = p99([each[place] for each in beside]) / p99([each[place] for each in alone])
        print(f"{what}, p99 beside / alone: {ratio:.2f}")
    print(", ".join(f"tokens/s {name}: {statistics.mean(each):,.0f}" for name, each in rates.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=100, help="of the light team in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--heavy-tokens", type=int, default=200)
    parser.add_argument("--light-tokens", type=int, default=20)
    parser.add_argument("--rate", type=float, default=40.0, help="tokens a second of each place of the fake engine")
    parser.add_argument("--warm-s", type=float, default=5.0)
    parser.add_argument("--real", action="store_true", help="the native engine, with random weights")
    parser.add_argument("--slowdown", default="1.15", help='the native engine\'s team_slowdown, or "off"')
    args = parser.parse_args()
    with ExitStack() as stack:
        folder, pages = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        engine: dict[str, object] = {"kind": "fake", "tokens_per_s": args.rate, "max_running": PLACES}
        if args.real:
            save_model(Path(folder), SHAPES["28M"], "float32")
            engine = {"max_running": PLACES, "max_model_len": 1024}
            engine["team_slowdown"] = None if args.slowdown == "off" else float(args.slowdown)
        spec = json.dumps({"name": "m", "model": folder, "engine": engine})
        control, ports = free_port(), [free_port(), free_port()]
        pairs = [f"{team}={secret}" for team, secret in SECRETS.items()]
        stack.enter_context(process([sys.executable, "-c", CONTROL, str(control), *pairs], control))
        environment = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment["METRICS_PAGES"] = str(page := Path(pages) / "pages")
        command = gateways(spec, ports, f"http://{HOST}:{control}")
        stack.enter_context(process(command, ports[0], "/health", more_env=environment))
        asyncio.run(measure(args, ports, page.read_text().split()[0]))
        print(f"load of the machine over the last minute: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
