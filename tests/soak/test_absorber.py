"""A load spike on an endpoint takes seats from a trainer for as long as it lasts, on real raylets and Ray Serve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.alone, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trainer" / "absorber.py"


def test_first_tokens_are_in_time_again_once_the_trainer_has_shrunk_and_not_otherwise(tmp_path: Path) -> None:
    out = tmp_path / "absorber.json"
    subprocess.run([sys.executable, SCRIPT, "--json", out], check=True)
    seen = json.loads(out.read_text())
    assert seen["within_bound"], {name: value for name, value in seen.items() if name != "runs"}
    assert seen["under_slo_at_s_without"] is None
    assert seen["least_ranks"] == 2
    assert seen["members_back_s_after_the_spike"] is not None
    assert seen["steps_compared"] > 100
    assert seen["samples_equal"]
