"""An open page over a busy cluster: neither the tab nor the API grows. PAGE_SOAK_S sets the time, an hour."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.browser_fixture import Tab

LASTS_S = float(os.environ.get("PAGE_SOAK_S", "3600"))
pytestmark = [pytest.mark.soak, pytest.mark.client, pytest.mark.timeout(LASTS_S + 900)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "page" / "busy_cluster.py"
PLACES = ("now", "runs", "capacity", "queue", "endpoints", "endpoints/chat-8b", "runs/job-1", "cost")
MOST_TAB_BYTES = 12 << 20
MOST_API_BYTES = 48 << 20
"""The most that each may grow after the first third: caches fill up, and Python's allocator keeps what it had."""


@pytest.fixture
def busy() -> Iterator[tuple[str, psutil.Process]]:
    process = subprocess.Popen([sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.match(r"(http://[\d.]+:\d+)/", process.stdout.readline())
        assert found is not None
        yield found[1], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_an_open_page_does_not_grow(busy: tuple[str, psutil.Process], tab: Tab) -> None:
    address, api = busy
    with tab(address, "benchmark") as watched:
        page = watched.open("now")
        developer = page.context.new_cdp_session(page)
        seen: list[tuple[float, int, int]] = []
        begun_s = time.monotonic()
        while (elapsed_s := time.monotonic() - begun_s) < LASTS_S:
            for place in PLACES:
                watched.open(place)
                page.wait_for_timeout(min(10_000, LASTS_S * 1000 / 60))
            watched.open("now")
            developer.send("HeapProfiler.collectGarbage")
            heap = developer.send("Runtime.getHeapUsage")["usedSize"]
            seen.append((elapsed_s, int(heap), api.memory_info().rss))
        settled = [each for each in seen if each[0] >= LASTS_S / 3] or seen[-2:]
        report = ", ".join(f"{at_s:.0f} s: {tab_b / 1e6:.1f} and {api_b / 1e6:.0f} MB" for at_s, tab_b, api_b in seen)
        assert settled[-1][1] - settled[0][1] < MOST_TAB_BYTES, f"the tab grew: {report}"
        assert settled[-1][2] - settled[0][2] < MOST_API_BYTES, f"the API grew: {report}"
        assert watched.problems == []
        sys.stdout.write(f"tab and API at {report}\n")
