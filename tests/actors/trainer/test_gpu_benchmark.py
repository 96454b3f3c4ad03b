"""The GPU benchmark runs as it is where there is torch, numpy, pydantic and safetensors, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        absent = {"ray", "sqlalchemy", "prometheus_client", "fsspec", "yaml", "httpx", "rich", "typer", "transformers"}
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_gpu_benchmark_runs_a_tiny_shape_on_a_bare_machine(tmp_path: Path) -> None:
    script, out = Path(__file__).parents[3] / "benchmarks" / "trainer" / "train_gpu.py", tmp_path / "rows.json"
    rows = ["plain", "eager", "compile+chunk+fp8", "compile+chunk+selective"]
    command = [sys.executable, "-c", SCRIPT, str(script), "--shapes", "tiny", "--rows", *rows, "--steps", "2"]
    command += ["--warm-up", "1", "--backend", "aot_eager", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [row["what"] for row in found] == rows
    assert all(row["tokens_per_s"] > 0 and not row["error"] for row in found)
