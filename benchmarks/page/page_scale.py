"""Measures the page with 1,000 jobs, 200 nodes and 50 endpoints. The results are the time to the first useful paint,
the smoothness, and the time of a call of `raytide ps`. With --screenshots, writes screenshots instead.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
from busy_cluster import TOKEN, Size, busy_api
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
USEFUL = ".stats .value"
"""The first numbers: before them the page shows only where they will be."""
FRAMES = """seconds => new Promise(done => {
  const gaps = []; let last = performance.now(); const end = last + seconds * 1000;
  const frame = at => {
    gaps.push(at - last); last = at;
    if (at < end) requestAnimationFrame(frame); else done(gaps.slice(1));
  };
  requestAnimationFrame(frame);
})"""
LONG_TASKS = """() => { window.long = [];
  const note = list => window.long.push(...list.getEntries().map(each => each.duration));
  new PerformanceObserver(note).observe({type: 'longtask'});
}"""
PAINTS = 7
PS_RUNS = 9
SHOTS = {
    "now": "now",
    "capacity": "capacity",
    "queue": "queue",
    "run": "runs/job-1",
    "endpoint": "endpoints/chat-8b",
    "cost": "cost",
    "model": "models/chat-8b",
    "alerts": "alerts",
}
COLOURS = 128
LOOKS = ((1280, 900, "dark"), (1280, 900, "light"), (390, 844, "dark"), (390, 844, "light"))


def open_page(browser: Browser, width: int = 1280, height: int = 900, theme: str = "dark") -> Page:
    scheme = "dark" if theme == "dark" else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.add_init_script(f"sessionStorage.setItem('raytide.token', '{TOKEN}')")
    return context.new_page()


def paint_s(browser: Browser, address: str) -> float:
    """Returns the seconds from the request of the page until its first numbers appear, with an empty cache."""
    page = open_page(browser)
    begun_s = time.perf_counter()
    page.goto(f"{address}/", wait_until="commit")
    page.wait_for_selector(USEFUL)
    took_s = time.perf_counter() - begun_s
    page.context.close()
    return took_s


def ps_ms(address: str) -> list[float]:
    """Returns the milliseconds of each call of `raytide ps`, including the start of Python."""
    environment = os.environ | {"RAYTIDE_API": address, "RAYTIDE_TOKEN": TOKEN}
    times = []
    for _ in range(PS_RUNS):
        begun_s = time.perf_counter()
        subprocess.run([sys.executable, "-m", "raytide.cli", "ps"], env=environment, check=True, capture_output=True)
        times.append(1000 * (time.perf_counter() - begun_s))
    return sorted(times)


def measure(browser: Browser, address: str, seconds: float) -> None:
    paints = sorted(paint_s(browser, address) for _ in range(PAINTS))
    print(f"first useful paint: median {statistics.median(paints):.2f} s, slowest {paints[-1]:.2f} s of {PAINTS}")
    calls = ps_ms(address)
    print(f"raytide ps: median {statistics.median(calls):.0f} ms, slowest {calls[-1]:.0f} ms of {PS_RUNS}")
    server = psutil.Process()
    for place in ("now", "runs", "capacity", "queue"):
        page = open_page(browser)
        page.goto(f"{address}/#/{place}")
        page.wait_for_selector(".link-state.live")
        page.evaluate(f"({LONG_TASKS})()")
        before = sum(server.cpu_times()[:2])
        gaps = sorted(page.evaluate(FRAMES, seconds))
        used = (sum(server.cpu_times()[:2]) - before) / seconds
        long = page.evaluate("window.long")
        late = sum(gap > 50 for gap in gaps) / len(gaps)
        print(
            f"{place:9} frames: median {statistics.median(gaps):.1f} ms,"
            f" 99 % within {gaps[int(0.99 * len(gaps))]:.0f} ms,"
            f" {late:.1%} later than 50 ms; longest task {max(long, default=0):.0f} ms;"
            f" API and records {used:.0%} of a core"
        )
        page.context.close()


def screenshots(browser: Browser, address: str, folder: Path) -> None:
    """Writes screenshots of each page, at both widths and in both themes. They have few colours, because the files are
    kept in the repository.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for width, height, theme in LOOKS:
        page = open_page(browser, width, height, theme)
        for name, place in SHOTS.items():
            page.goto(f"{address}/#/{place}")
            page.wait_for_selector(".link-state.live")
            page.wait_for_selector("main .skeleton", state="detached")
            page.wait_for_timeout(12_000 if name == "endpoint" else 1500)
            file = folder / f"{name}-{width}-{theme}.png"
            page.screenshot(path=file, full_page=width == 1280)
            image = Image.open(file).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            image.save(file, optimize=True)
            print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")
        page.context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="for which frames are watched on each page")
    parser.add_argument(
        "--screenshots", type=Path, help="write the pages of a small cluster there, and measure nothing"
    )
    options = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("Chromium is not installed")
    size = Size(60, 24, 6) if options.screenshots else Size()
    with busy_api(size) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(OPTIONS))
        if options.screenshots:
            screenshots(browser, address, options.screenshots)
        else:
            print(f"{size}, Chromium {browser.version}, {psutil.cpu_count()} cores, seed 17")
            measure(browser, address, options.seconds)
        browser.close()


if __name__ == "__main__":
    main()
