"""Small runs of the benchmarks of data planes and prefill replicas: what they compare is there and does its part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "gateway"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def run(script: str, *options: str) -> list[list[str]]:
    """Returns the words of each line that the script prints."""
    command = [sys.executable, str(SCRIPTS / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


def cells(rows: Sequence[Sequence[str]], columns: str) -> dict[str, list[str]]:
    """Returns the lines below the one that begins with `columns`, up to an empty one, by their first words."""
    at = next(number for number, row in enumerate(rows) if " ".join(row).startswith(columns))
    found: dict[str, list[str]] = {}
    for row in rows[at + 1 :]:
        if not row or row[0] == "load":
            break
        found[row[0]] = list(row[1:])
    return found


def test_a_lost_replica_breaks_streams_through_a_proxy_and_none_through_the_gateway() -> None:
    small = ["--streams", "40", "--rounds", "1", "--tokens", "4", "--fast-streams", "4", "--loss-rounds", "1"]
    rows = run(
        "data_planes.py", *small, "--sides", "gateway", "keys", "haproxy", "thin", "sglang", "--loss-streams", "8"
    )
    (why,) = (" ".join(row) for row in rows if row[:3] == ["sglang", "cannot", "run:"])
    assert "--sglang-router" in why
    names = ["gateway", "keys", "haproxy", "thin"]
    firsts = [row[1] for row in rows if row[:1] == ["40"]]
    assert firsts == ["bare", *names]
    costs = cells(rows, "side tokens/s")
    assert list(costs) == ["bare", *names]
    between = {name: float(row[4]) for name, row in costs.items()}
    assert between.pop("bare") == 0
    assert min(between.values()) > 0
    assert all(float(costs[name][-1]) > between[name] for name in names), costs  # with the engine's own
    ends = cells(rows, "side whole")
    assert list(ends) == names
    for name, (whole, broken, _, *answered) in ends.items():
        if name in ("gateway", "keys"):
            assert (whole, broken) == ("8", "0"), name
            assert answered == ["8", "of", "8"]
        else:
            assert int(broken) > 0, name
            assert int(whole) + int(broken) == 8


def test_prefill_replicas_compute_the_long_prompts_of_their_side_alone() -> None:
    small = ["--rounds", "1", "--seconds", "6", "--chats", "2", "--long", "400", "--shares", "0.8"]
    rows = run("prefill_decode.py", *small, "--sides", "both-128", "split")
    assert [row[1] for row in rows if row[:1] == ["0.8"]] == ["both-128", "split"]
    computed = {row[0]: [float(each.strip(",")) for each in row[-2:]] for row in rows if "engine:" in row}
    chats, long_ones = computed["split:"]
    assert chats > 0
    assert long_ones >= 400
