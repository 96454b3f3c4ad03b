from __future__ import annotations

from pathlib import Path

from raytide.core.telemetry.reference import tables

DOC = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_documented_metrics_are_those_of_the_catalogue() -> None:
    assert DOC.read_text(encoding="utf-8").endswith(tables()), "run python -m raytide.core.telemetry.reference"
