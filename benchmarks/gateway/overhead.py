"""Compares the gateway and other proxies with an engine's own server: time to first token and tokens a second.

    python benchmarks/gateway/overhead.py [--streams 1 32 256] [--rounds 5] [--serve] [--litellm PATH]

A side is a server, with or without a proxy in front of it. All sides use the same fake engine. It yields `--rate`
tokens a second for each stream. The sides are:

- `bare`: the engine's own HTTP server in one process.
- `gateway`: an engine process and two gateway processes, as `raytide up` starts them.
- `serve` (with --serve): a deployment behind Ray Serve's proxy.
- `litellm` (with --litellm): LiteLLM's proxy in front of the bare server.

One generator process opens all streams at once, and the sides take turns. Prints the median and the 99th percentile
of the time to first token, and the difference between a side's median and that of `bare` in the same round. For
`tokens/s`, the engine yields 100 tokens a second for each of 256 streams. `tokens/s` is the throughput of all these
streams together. Also prints the number of events a second that carried these tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "platform"))

HOST = "127.0.0.1"
FIRST_TOKENS = f"{'streams':>8} {'side':>8} {'first ms':>9} {'added ms':>9} {'quartiles':>16} {'p99 ms':>8}"
S = TypeVar("S")
_CONTENT = re.compile(r'"content":"([^"]*)"')
BARE = """
import json, sys, uvicorn
from raytide.actors.engine import FakeEngine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server
port, rate, *foreign = sys.argv[1:]
engine = FakeEngine(model="m", tokens_per_s=float(rate) or None, max_running=1024, max_waiting=4096)
app = create_app(Server(engine, model="m"))
async def without_foreign_fields(scope, receive, send):
    async def receive_own():
        message = await receive()
        if message.get("body"):
            body = {name: value for name, value in json.loads(message["body"]).items() if name not in foreign}
            message["body"] = json.dumps(body).encode()
        return message
    await app(scope, receive_own, send)
uvicorn.run(without_foreign_fields if foreign else app, host="127.0.0.1", port=int(port), log_level="error")
"""
"""Fields of requests that are named as further arguments are dropped."""
GATEWAY = """
import asyncio, json, os, subprocess, sys
from raytide.actors.serving.engine_child import EngineChild
from raytide.core.objects.endpoint import ServeSpec
async def main(worker, spec, control, replicas, *ports):
    spec = ServeSpec.model_validate_json(spec)
    names = [f"r{number + 1}" for number in range(int(replicas))]
    children = {name: await EngineChild.start(spec, "127.0.0.1", name, model_dir=spec.model) for name in names}
    with open(os.environ.get("METRICS_PAGES", os.devnull), "a") as pages:
        for child in children.values():
            print(child.metrics, file=pages)
    addresses = {name: [child.port, child.secret] for name, child in children.items()}
    told = [spec.model_dump_json(), json.dumps(addresses), control]
    started = [subprocess.Popen([sys.executable, "-c", worker, port, *told]) for port in ports]
    await asyncio.to_thread(started[0].wait)
asyncio.run(main(*sys.argv[1:]))
"""
WORKER = """
import asyncio, json, os, sys, tempfile
from pathlib import Path
from raytide.actors.serving.ray_serve.keys import ReplicaAddress
from raytide.core.objects.endpoint import ServeSpec
from raytide.gateway import __main__ as gateway
from raytide.gateway.replicas.directory import EndpointEntry
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.tenancy import Tenancy
from raytide.gateway.tracing import RequestTracing
from raytide.core.telemetry.settings import TracingSection
port, spec, addresses, control = sys.argv[1:]
replicas = {name: ReplicaAddress("127.0.0.1", *each) for name, each in json.loads(addresses).items()}
entry = EndpointEntry(ServeSpec.model_validate_json(spec), 1.0, replicas)
class Directory:
    def __init__(self, gcs_address, on_change):
        self.start = lambda: on_change({"m": entry})
    def report(self, key, value): pass
    def stop(self): pass
gateway.Directory = Directory
name, files = str(os.getpid()), Path(tempfile.mkdtemp())
tenancy = Tenancy(ControlApi(control or "http://127.0.0.1:9", "any", name), requires_keys=bool(control))
def announce(page):
    with open(os.environ.get("METRICS_PAGES", os.devnull), "a") as pages:
        print(page, file=pages)
if switch := os.environ.get("OBSERVED"):
    import mmap
    from raytide.actors.serving.metrics import RequestTracker
    from raytide.gateway.tracing import TracedRequests
    byte = mmap.mmap(os.open(switch, os.O_RDONLY), 1, prot=mmap.PROT_READ)
    def while_observed(record, go_on):
        return lambda *args, **kwargs: record(*args, **kwargs) if byte[0] else go_on(*args, **kwargs)
    for method in ("tokens", "first_token", "ended", "finish"):
        setattr(RequestTracker, method, while_observed(getattr(RequestTracker, method), lambda *_, **__: None))
    TracedRequests.__call__ = while_observed(TracedRequests.__call__, lambda self, *scope: self._app(*scope))
tracing = RequestTracing.of(TracingSection(otlp=os.environ.get("OTLP", "")))
gateway.serve("", gateway.bound_socket("127.0.0.1", int(port)), name, tenancy, files, (), announce, tracing)
"""
"""With METRICS_PAGES, a file that gets the addresses of all metrics pages, OTLP, the collector of traces, and
OBSERVED, a file whose one byte is not 0 while metrics and traces are to be recorded, in the environment."""
SERVE = """
import sys, time
import ray
from ray import serve
from raytide.actors.engine import FakeEngine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server
rate = float(sys.argv[2]) or None
@serve.deployment(max_ongoing_requests=4096, num_replicas=int(sys.argv[3]), ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Replica:
    async def __init__(self):
        self.server = Server(FakeEngine(model="m", tokens_per_s=rate, max_running=1024, max_waiting=4096), model="m")
        await self.server.start()
    def __serve_build_asgi_app__(self):
        return create_app(self.server, owns_server=False)
ray.init("local", include_dashboard=False, log_to_driver=False)  # never a cluster that others have started here
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(Replica.bind(), route_prefix="/")
time.sleep(1e6)
"""


@dataclass(frozen=True)
class Side:
    name: str
    port: int
    key: str = "sk-none"


@contextmanager
def process(
    command: list[str],
    port: int,
    path: str = "/v1/models",
    wait_s: float = 120.0,
    more_env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[int]:
    """Runs a server process, yields the id of its process group, and ends it with all of its descendants."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "platform"), "RAY_AUTH_MODE": "disabled", "PYTHONWARNINGS": "ignore"}
    env["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # no keys here, nor in the gateway
    env |= more_env
    log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
    started = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        until_s = time.monotonic() + wait_s
        while True:
            try:
                urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=5).read()
                break
            except OSError:
                if started.poll() is not None or time.monotonic() > until_s:
                    log.seek(0)
                    sys.exit(f"{command[:3]} does not answer:\n{log.read().decode()[-3000:]}")
                time.sleep(0.2)
        yield started.pid
    finally:
        left = descendants(started.pid)
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
            os.killpg(started.pid, signal.SIGCONT)
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait(20)
        for each in psutil.wait_procs(left, timeout=10)[1]:  # such as HAProxy, which outlives the actor that started it
            with suppress(psutil.NoSuchProcess):
                each.kill()


def descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


@dataclass(frozen=True)
class StreamedAnswer:
    text: str
    events: int
    """The number of events with text."""
    first_s: float
    """The time to the first token."""
    pause_s: float
    """The longest time between two arrivals after the first token."""
    is_whole: bool
    """True if the server ended it as it ends complete answers."""


async def ask(
    port: int, tokens: int, key: str = "sk-none", on_first: Callable[[], object] = lambda: None
) -> StreamedAnswer:
    """Sends one request and reads the streamed answer until the stream ends. A stream that ends early is no error.
    Calls `on_first` once, at the first token. Raises OSError if the server refuses or resets the connection.
    """
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\nConnection: close"
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(f"{head}\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n\r\n".encode() + data)
    first_s, last_s, pause_s, answer = 0.0, 0.0, 0.0, bytearray()
    try:
        while piece := await reader.read(1 << 16):
            answer += piece
            now_s = time.perf_counter() - began_s
            if first_s:
                pause_s = max(pause_s, now_s - last_s)
            elif answer.count(b'"content":"') > 1:  # the first event has the role and no text
                first_s = now_s
                on_first()
            last_s = now_s
    finally:
        writer.close()
    texts = [text for text in _CONTENT.findall(answer.decode()) if text]
    return StreamedAnswer("".join(texts), len(texts), first_s, pause_s, b"data: [DONE]" in answer)


async def stream(port: int, tokens: int, key: str = "sk-none") -> tuple[float, int]:
    """Opens one stream. Returns the time to its first token in seconds, and the number of events with text."""
    answer = await ask(port, tokens, key)
    assert answer.is_whole and len(answer.text) == tokens, answer  # the fake engine's tokens are characters
    return answer.first_s, answer.events


async def round_of(port: int, streams: int, tokens: int, key: str = "sk-none") -> tuple[list[float], float, float]:
    """Starts several streams at once. Returns a list with the time to first token of each stream, and the tokens per
    second and the events per second of all streams together.
    """
    began_s = time.perf_counter()
    done = await asyncio.gather(*(stream(port, tokens, key) for _ in range(streams)))
    seconds = time.perf_counter() - began_s
    return [first_s for first_s, _ in done], streams * tokens / seconds, sum(events for _, events in done) / seconds


def free_port() -> int:
    """Returns a free port below the range from which Linux takes ports for outgoing connections. A connection could
    take a port in that range before the server does.
    """
    for _ in range(1000):
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise OSError("no port between 20000 and 30000 is free")


def gateways(spec: str, ports: Sequence[int], control: str = "", replicas: int = 1) -> list[str]:
    """Returns a command that starts the engine processes and the gateway processes. One gateway process is started for
    each entry of `ports`. Several gateways may share a port. If `control` is given, callers need API keys of the
    control API at this address.
    """
    return [sys.executable, "-c", GATEWAY, WORKER, spec, control, str(replicas), *map(str, ports)]


def sides_of(args: argparse.Namespace, rate: float, stack: ExitStack) -> list[Side]:
    engine = {"kind": "fake", "tokens_per_s": rate or None, "max_running": 1024, "max_waiting": 4096}
    spec = {"name": "m", "model": stack.enter_context(tempfile.TemporaryDirectory()), "engine": engine}
    commands: dict[str, Callable[[int], list[str]]] = {
        "bare": lambda port: [sys.executable, "-c", BARE, str(port), str(rate)],
        "gateway": lambda port: gateways(json.dumps(spec), [port, port]),
    }
    if args.serve:
        commands["serve"] = lambda port: [sys.executable, "-c", SERVE, str(port), str(rate), "1"]
    sides = []
    for name, command_for in commands.items():
        port = free_port()
        stack.enter_context(process(command_for(port), port))
        sides.append(Side(name, port))
    if args.litellm:
        port = free_port()
        config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "config.yaml"
        upstream = {"model": "openai/m", "api_base": f"http://{HOST}:{sides[0].port}/v1", "api_key": "none"}
        config.write_text(json.dumps({"model_list": [{"model_name": "m", "litellm_params": upstream}]}))
        command = [args.litellm, "--config", str(config), "--port", str(port), "--host", HOST]
        stack.enter_context(process(command, port, "/health/liveliness"))
        sides.append(Side("litellm", port))
    return sides


def first_tokens(sides: Sequence[Side], streams: int, rounds: int, tokens: int) -> None:
    """Prints two figures for each side. The first is the time to first token: its median and its 99th percentile. The
    second is how much longer this time is than on the side `bare`: the median and the quartiles over the rounds.
    """
    seen: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    for turn in range(rounds):
        for side in in_turn(sides, turn):
            seen[side.name].append(asyncio.run(round_of(side.port, streams, tokens, side.key))[0])
    for side in sides:
        pairs = zip(seen[side.name], seen["bare"], strict=True)
        added_ms = [1e3 * (statistics.median(own) - statistics.median(bare)) for own, bare in pairs]
        every = sorted(1e3 * first_s for firsts in seen[side.name] for first_s in firsts)
        print(
            f"{streams:>8} {side.name:>8} {statistics.median(every):>9.1f} {spread(added_ms, '9.1f')} "
            f"{every[min(len(every) - 1, int(0.99 * len(every)))]:>8.1f}",
            flush=True,
        )


def in_turn(sides: Sequence[S], turn: int) -> Sequence[S]:
    """Returns the sides in their order for a round. In every other round, the order is reversed."""
    return sides[::-1] if turn % 2 else sides


def spread(values: Sequence[float], form: str) -> str:
    """Returns the median and the quartiles as text."""
    low, median, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else 3 * [*values]
    return f"{median:{form}} {f'{low:{form}}'.strip() + ' to ' + f'{high:{form}}'.strip():>16}"


def throughput(sides: Sequence[Side], rounds: int) -> None:
    """Measures each side with many fast streams. Prints the tokens per second and the events per second of each side in
    its best round.
    """
    best = {side.name: max(asyncio.run(round_of(side.port, 256, 100))[1:] for _ in range(rounds)) for side in sides}
    shown = (f"{name} {tokens:,.0f} in {events:,.0f} events" for name, (tokens, events) in best.items())
    print("tokens/s: " + ", ".join(shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=12, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help="also Ray Serve's proxy")
    parser.add_argument("--litellm", help="also LiteLLM's proxy: the path of its command")
    args = parser.parse_args()
    with ExitStack() as stack:
        sides = sides_of(args, args.rate, stack)
        for side in sides:
            asyncio.run(round_of(side.port, 4, 4))
        print(FIRST_TOKENS)
        for streams in args.streams:
            first_tokens(sides, streams, max(args.rounds, 40 // streams), args.tokens)
    with ExitStack() as stack:
        throughput(sides_of(args, 100.0, stack), args.rounds)


if __name__ == "__main__":
    main()
