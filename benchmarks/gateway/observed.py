"""Measures what metrics and traces cost a real engine: tokens a second with both switched on, and with both switched
off.

    python benchmarks/gateway/observed.py [--streams 1 8 32] [--pairs 60] [--threads 1] [--scrape-s 5]

The native engine with 28M random weights runs behind two gateway processes, as `raytide up` starts them. There are
two modes. In mode `on`, all metrics are recorded, the three metrics pages are scraped every `--scrape-s` seconds
(raytide's default is 15), and 1 % of the requests are sent as traces to a collector on this machine. In mode `off`,
nothing is recorded, scraped or sent. The same processes are switched between the modes from round to round, because
two instances of one server differ by several per cent.

Rounds form pairs, and the mode that begins changes from pair to pair. Prints the median of the tokens a second in
each mode, the median of the pairs' ratios, and the 95 % confidence interval of this median (order statistics of the
binomial distribution).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_cpu import save_model
from overhead import HOST, free_port, gateways, process
from real_engine import MAX_LEN, NEW_TOKENS, SHAPE, served_side
from scipy.stats import binom

TICK_S = 0.05


class Collector(BaseHTTPRequestHandler):
    """Accepts traces and discards them."""

    received = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        Collector.received += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    server = ThreadingHTTPServer((HOST, 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{HOST}:{server.server_port}"
    server.shutdown()


class Switch:
    """A byte in a file. It tells the gateways whether to record."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"\0")
        with path.open("r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)

    @property
    def is_on(self) -> bool:
        return bool(self._byte[0])

    def turn(self, name: str) -> None:
        self._byte[0] = int(name == "on")


@contextmanager
def scraped(pages: Path, every_s: float, switch: Switch) -> Iterator[list[int]]:
    """Starts a thread that reads all metrics pages. It reads them once for every `every_s` seconds during which the
    switch is on. Yields a list to which the thread appends the size of each page that it has read, in bytes. The thread
    ends with the context.
    """
    stopped, sizes = threading.Event(), list[int]()

    def run() -> None:
        waited_s = 0.0
        while not stopped.wait(TICK_S):
            waited_s += TICK_S * switch.is_on
            if waited_s >= every_s:
                waited_s = 0.0
                for page in pages.read_text().split():
                    with suppress(OSError):
                        sizes.append(len(urllib.request.urlopen(f"http://{page}/metrics", timeout=5).read()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield sizes
    stopped.set()
    thread.join(10)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the median."""
    ordered, count = sorted(ratios), len(ratios)
    below = int(binom.ppf(0.025, count, 0.5))
    return ordered[max(0, below - 1)], ordered[min(count - 1, count - below)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--pairs", type=int, default=60, help="of rounds, for each number of streams")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scrape-s", type=float, default=5.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model, pages = Path(folder) / "model", Path(folder) / "pages"
        save_model(model, SHAPE, "float32")
        pages.touch()
        engine = {"dtype": "float32", "prefix_cache": False, "max_model_len": MAX_LEN, "kv_memory_gb": 1.0}
        spec = json.dumps({"name": "m", "model": str(model), "engine": engine, "resources": {"CPU": args.threads}})
        threads = {name: str(args.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        port, switch = free_port(), Switch(Path(folder) / "observed")
        more = {"OTLP": stack.enter_context(collector()), "METRICS_PAGES": str(pages)}
        more["OBSERVED"] = str(Path(folder) / "observed")
        stack.enter_context(process(gateways(spec, [port, port]), port, more_env=threads | more))
        sizes = stack.enter_context(scraped(pages, args.scrape_s, switch))
        run = served_side(port, "m")
        rng = random.Random(0)
        print(f"{'streams':>8} {'off tok/s':>10} {'on tok/s':>10} {'on / off':>9} {'95 % interval':>16}")
        for streams in args.streams:
            rates: dict[str, list[float]] = {"off": [], "on": []}
            for turn in range(args.pairs + 1):
                prompts = [[rng.randrange(1, 256) for _ in range(rng.randint(16, 64))] for _ in range(streams)]
                for name in sorted(rates, reverse=bool(turn % 2)):
                    switch.turn(name)
                    seconds, _ = run(prompts)
                    if turn:  # the first round warms up
                        rates[name].append(streams * NEW_TOKENS / seconds)
            ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
            low, high = interval(ratios)
            medians = [statistics.median(rates[name]) for name in ("off", "on")]
            print(
                f"{streams:>8} {medians[0]:>10.0f} {medians[1]:>10.0f} {statistics.median(ratios):>9.3f} "
                f"{low:>8.3f} to {high:.3f}",
                flush=True,
            )
        print(f"{len(sizes)} pages were scraped, {Collector.received} exports of traces received")
        print(f"load of the machine over the last minute: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
