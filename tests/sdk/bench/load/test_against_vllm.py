"""`raytide bench` sees what vLLM's own load generator sees; the benchmark compares them closely, this the shape."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]

pytestmark = [
    pytest.mark.client,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="./dev setup --vllm installs it"),
]


def test_both_generators_see_the_same_endpoint() -> None:
    script = ROOT / "benchmarks" / "gateway" / "bench_agreement.py"
    options = ["--rounds", "1", "--requests", "24", "--concurrency", "4", "--tokens", "24"]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if "raytide / vllm" in line)
    ratios = [float(each) for each in line.split()[-4:]]
    assert all(0.6 < ratio < 1.6 for ratio in ratios), done.stdout
