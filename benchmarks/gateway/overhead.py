"""Measures the gateway against an engine's own server: time to first token and tokens a second, beside other proxies.

    python benchmarks/gateway/overhead.py [--streams 1 32 256] [--rounds 5] [--serve] [--litellm PATH]

Every side has the same engine behind it, a fake one that yields `--rate` tokens a second for each stream. `bare` is the
engine's own HTTP server in one process; `gateway` an engine process and two gateway processes, as `raytide up` starts
them; `serve` (with --serve) a deployment behind Ray Serve's proxy; `litellm` LiteLLM's proxy in front of the bare
server. One generator process opens the streams at once, the sides take turns, and each round's figures are differences
to `bare` in the same round: median and 99th percentile of the time to first token. `tokens/s` is the throughput of 256
streams whose engine yields 100 tokens a second for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "platform"))

HOST = "127.0.0.1"
_CONTENT = re.compile(r'"content":"([^"]*)"')
BARE = """
import sys, uvicorn
from raytide.actors.engine import FakeEngine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server
rate = float(sys.argv[2]) or None
engine = FakeEngine(model="m", tokens_per_s=rate, max_running=1024, max_waiting=4096)
uvicorn.run(create_app(Server(engine, model="m")), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
GATEWAY = """
import asyncio, json, os, subprocess, sys
from raytide.actors.serving.engine_child import EngineChild
from raytide.core.objects.endpoint import ServeSpec
async def main(worker, spec, control, *ports):
    spec = ServeSpec.model_validate_json(spec)
    child = await EngineChild.start(spec, "127.0.0.1", "r1", model_dir=spec.model)
    with open(os.environ.get("METRICS_PAGES", os.devnull), "a") as pages:
        print(child.metrics, file=pages)
    told = [spec.model_dump_json(), str(child.port), child.secret, control]
    started = [subprocess.Popen([sys.executable, "-c", worker, port, *told]) for port in ports]
    await asyncio.to_thread(started[0].wait)
asyncio.run(main(*sys.argv[1:]))
"""
WORKER = """
import asyncio, os, sys, tempfile
from pathlib import Path
from raytide.actors.serving.ray_serve.keys import ReplicaAddress
from raytide.core.objects.endpoint import ServeSpec
from raytide.gateway import __main__ as gateway
from raytide.gateway.replicas.directory import EndpointEntry
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.tenancy import Tenancy
from raytide.gateway.tracing import RequestTracing
from raytide.core.telemetry.settings import TracingSection
port, spec, engine_port, secret, control = sys.argv[1:]
address = ReplicaAddress("127.0.0.1", int(engine_port), secret)
entry = EndpointEntry(ServeSpec.model_validate_json(spec), 1.0, {"r1": address})
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
from ray import serve
from raytide.actors.engine import FakeEngine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server
rate = float(sys.argv[2]) or None
@serve.deployment(max_ongoing_requests=4096)
@serve.ingress()
class Replica:
    async def __init__(self):
        self.server = Server(FakeEngine(model="m", tokens_per_s=rate, max_running=1024, max_waiting=4096), model="m")
        await self.server.start()
    def __serve_build_asgi_app__(self):
        return create_app(self.server, owns_server=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(Replica.bind(), route_prefix="/")
time.sleep(1e6)
"""


@dataclass(frozen=True)
class Side:
    name: str
    port: int


@contextmanager
def process(
    command: list[str],
    port: int,
    path: str = "/v1/models",
    wait_s: float = 120.0,
    more_env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[int]:
    """Runs a server process, yields the id of its process group, and ends it with all of its children."""
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
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
            os.killpg(started.pid, signal.SIGCONT)
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)


async def stream(port: int, tokens: int) -> tuple[float, int]:
    """Returns the time to the first token of one stream, in seconds, and its tokens."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\nConnection: close"
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(f"{head}\r\nContent-Type: application/json\r\nAuthorization: Bearer sk-none\r\n\r\n".encode() + data)
    first_s, answer = 0.0, bytearray()
    while piece := await reader.read(1 << 16):
        answer += piece
        if not first_s and answer.count(b'"content":"') > 1:  # the first event has the role and no text
            first_s = time.perf_counter() - began_s
    writer.close()
    text = "".join(_CONTENT.findall(answer.decode()))
    assert len(text) == tokens, (len(text), bytes(answer[-500:]))  # the fake engine's tokens are characters
    return first_s, len(text)


async def round_of(port: int, streams: int, tokens: int) -> tuple[list[float], float]:
    """Returns the times to first token of streams that start together, and their tokens a second."""
    began_s = time.perf_counter()
    done = await asyncio.gather(*(stream(port, tokens) for _ in range(streams)))
    seconds = time.perf_counter() - began_s
    return [first_s for first_s, _ in done], sum(count for _, count in done) / seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def gateways(spec: str, ports: Sequence[int], control: str = "") -> list[str]:
    """Returns the command of an engine process and a gateway process for each port, which may be the same one. Callers
    need the API keys of the control API at `control`, if there is one.
    """
    return [sys.executable, "-c", GATEWAY, WORKER, spec, control, *map(str, ports)]


def sides_of(args: argparse.Namespace, rate: float, stack: ExitStack) -> list[Side]:
    engine = {"kind": "fake", "tokens_per_s": rate or None, "max_running": 1024, "max_waiting": 4096}
    spec = {"name": "m", "model": stack.enter_context(tempfile.TemporaryDirectory()), "engine": engine}
    commands: dict[str, Callable[[int], list[str]]] = {
        "bare": lambda port: [sys.executable, "-c", BARE, str(port), str(rate)],
        "gateway": lambda port: gateways(json.dumps(spec), [port, port]),
    }
    if args.serve:
        commands["serve"] = lambda port: [sys.executable, "-c", SERVE, str(port), str(rate)]
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


def first_tokens(args: argparse.Namespace) -> None:
    """Prints what each side adds to the time to first token."""
    with ExitStack() as stack:
        sides = sides_of(args, args.rate, stack)
        for side in sides:
            asyncio.run(round_of(side.port, 4, 4))
        print(f"{'streams':>8} {'side':>8} {'first ms':>9} {'added ms':>9} {'p99 ms':>8}")
        for streams in args.streams:
            rounds = max(args.rounds, 40 // streams)
            seen: dict[str, list[list[float]]] = {side.name: [] for side in sides}
            for _ in range(rounds):
                for side in sides:
                    seen[side.name].append(asyncio.run(round_of(side.port, streams, args.tokens))[0])
            for side in sides:
                pairs = zip(seen[side.name], seen["bare"], strict=True)
                added = statistics.median(statistics.median(own) - statistics.median(bare) for own, bare in pairs)
                every = sorted(first for firsts in seen[side.name] for first in firsts)
                p99 = every[min(len(every) - 1, int(0.99 * len(every)))]
                median = statistics.median(every)
                print(f"{streams:>8} {side.name:>8} {median * 1e3:>9.1f} {added * 1e3:>9.1f} {p99 * 1e3:>8.1f}")


def throughput(args: argparse.Namespace) -> None:
    """Prints the tokens a second of many fast streams; the best of the rounds."""
    with ExitStack() as stack:
        sides = sides_of(args, 100.0, stack)
        best = {
            side.name: max(asyncio.run(round_of(side.port, 256, 100))[1] for _ in range(args.rounds)) for side in sides
        }
    print("tokens/s: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in best.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=12, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help="also Ray Serve's proxy")
    parser.add_argument("--litellm", help="also LiteLLM's proxy: the path of its command")
    args = parser.parse_args()
    first_tokens(args)
    throughput(args)


if __name__ == "__main__":
    main()
