"""Small traces of the tests' own: two hours of requests, two zones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytide.simulate.serving.setup import ServingSetup

GAP_S = 300.0


@pytest.fixture
def requests_csv(tmp_path: Path) -> Path:
    """One request every second, in pairs of a short and a long prompt."""
    rows = [f"{second},{300 if second % 2 else 1500},{second % 40}" for second in range(120)]
    path = tmp_path / "requests.csv"
    path.write_text("t_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def trace(zone: str, rle: list[list[int]], **fields: Any) -> dict[str, Any]:
    defaults = {"kind": "availability", "gpu": "v100", "gpus_per_node": 1, "gap_seconds": GAP_S, "collection": "c1"}
    return {**defaults, "zone": zone, "rle": rle, **fields}


@pytest.fixture
def spot_json(tmp_path: Path) -> Path:
    """Zone a goes after each hour for a quarter; zone b is there in every second hour."""
    path = tmp_path / "spot.json"
    traces = {
        "availability/c1/a_v100_1": trace("a", [[1, 12], [0, 3]] * 20),
        "availability/c1/b_v100_1": trace("b", [[0, 12], [1, 12]] * 13),
        "availability/c1/b_k80_1": trace("b", [[1, 300]], gpu="k80"),
        "preemption/c2/a_v100_1": trace("a", [[1, 300]], kind="preemption", collection="c2"),
    }
    path.write_text(json.dumps(traces))
    return path


@pytest.fixture
def setup(requests_csv: Path, spot_json: Path) -> ServingSetup:
    """A tenth of a day with a rate that keeps two replicas busy."""
    return ServingSetup(requests=requests_csv, spot=spot_json, collection="c1", days=0.1, peak_rps=2.0, max_replicas=6)
