"""Spot traces from a file: spread, chosen by collection, zone and kind, and refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytide.core.errors import DataError
from raytide.simulate.spot import SpotTrace, read, select, stacked


def entry(zone: str, **changes: Any) -> dict[str, Any]:
    fields = {"kind": "availability", "collection": "aws-2023", "zone": zone, "gpu": "v100", "gpus_per_node": 1}
    return {**fields, "gap_seconds": 195, "n": 5, "rle": [[0, 2], [3, 3]], **changes}


def written(folder: Path, entries: dict[str, dict[str, Any]]) -> tuple[SpotTrace, ...]:
    path = folder / "spot.json"
    path.write_text(json.dumps(entries))
    return read(path)


def test_counts_are_spread_over_the_ticks(tmp_path: Path) -> None:
    (trace,) = written(tmp_path, {"availability/a": entry("east-1a", prices_rle=[[0.5, 5]])})
    assert trace.nodes.tolist() == [0, 0, 3, 3, 3]
    assert (trace.zone, trace.gap_s, trace.gpus_per_node) == ("east-1a", 195, 1)


def test_zones_come_in_the_order_asked_for_and_are_cut_to_the_shortest(tmp_path: Path) -> None:
    traces = written(tmp_path, {"x/a": entry("a"), "x/b": entry("b", rle=[[1, 4]]), "y/a": entry("a")})
    assert [trace.zone for trace in select(traces, "x")] == ["a", "b"]
    assert np.array_equal(stacked(select(traces, "x", zones=["b", "a"])), [[1, 1, 1, 1], [0, 0, 3, 3]])


def test_a_kind_of_node_is_chosen_and_the_usual_one_meant_when_none_is_named(tmp_path: Path) -> None:
    entries = {"x/1": entry("a", gpu="k80"), "x/8": entry("a", gpus_per_node=8), "x/v": entry("a")}
    traces = written(tmp_path, entries)
    assert [trace.key for trace in select(traces, "x")] == ["x/v"]
    assert [trace.key for trace in select(traces, "x", gpu="k80")] == ["x/1"]
    assert [trace.key for trace in select(traces, "x", gpu="v100", gpus_per_node=8)] == ["x/8"]


def test_what_is_not_there_or_ambiguous_is_refused_with_what_there_is(tmp_path: Path) -> None:
    entries = {"x/p": entry("a", kind="preemption"), "x/a": entry("a"), "x/b": entry("b", gap_seconds=32)}
    traces = written(tmp_path, entries)
    with pytest.raises(DataError, match="aws-2023"):
        select(traces, "z")
    with pytest.raises(DataError, match=r"It has availability of v100 x 1, preemption of v100 x 1\."):
        select(traces, "x", gpu="k80")
    with pytest.raises(DataError, match=r"in c\. There are: a, b"):
        select(traces, "x", zones=["a", "c"])
    with pytest.raises(DataError, match="several traces for zone a: x/p, x/a"):
        select(traces, "x")
    with pytest.raises(DataError, match="different gaps"):
        select(traces, "x", kind="availability")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"\(top\)"),
        ('{"a": {}}', "a.kind"),
        (json.dumps({"a": entry("a", rle=[[1, 0]])}), "a.rle.0.1"),
        (json.dumps({"a": entry("a")}).replace("[0, 2]", "[1e400, 2]"), "a.rle.0.0"),
    ],
)
def test_a_broken_file_is_refused_by_the_name_of_its_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "spot.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_file_that_is_not_there_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read(tmp_path / "none.json")
