"""A measured speed in cluster.yaml: one entry changes, and no other character."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raytide.core.errors import ConfigError
from raytide.core.objects.cluster_config import load_cluster
from raytide.sdk.bench.node.speed_entry import write_speed

EXAMPLE = Path(__file__).parents[4] / "cluster.yaml"
BLOCK = """# mine
metadata:
  raytide:
    node_types:
      old:
        # what it costs
        price_usd_h: 1.0  # today
        speed: 2.0  # twice a T4
      new: &new
        price_usd_h: 4.0
      empty: {}
      twin: *new
"""


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_bytes(text.encode())
    return path


def test_a_speed_is_replaced_where_it_stands_and_comments_stay(tmp_path: Path) -> None:
    path = write(tmp_path, BLOCK)
    change = write_speed(path, "old", 1.5, "empty")
    assert path.read_text() == BLOCK.replace("speed: 2.0  #", "speed: 1.5  #")
    assert str(change) == f"{path}: metadata.raytide.node_types.old: speed was 2, and is 1.5 now."


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_new_speed_is_relative_to_that_of_the_reference(tmp_path: Path, newline: str) -> None:
    text = BLOCK.replace("      twin: *new\n", "").replace("&new", "").replace("\n", newline)
    path = write(tmp_path, text)
    change = write_speed(path, "new", 3.0, "old")
    assert (change.before, change.after) == (None, 6.0)
    added = text.replace("price_usd_h: 4.0", f"speed: 6{newline}        price_usd_h: 4.0")
    assert path.read_bytes() == added.encode()
    write_speed(path, "empty", 0.25, "new")
    assert path.read_bytes() == added.replace("empty: {}", "empty: {speed: 1.5}").encode()


@pytest.mark.usefixtures("strict_umask")
def test_the_repository_s_example_is_changed_and_still_loads(tmp_path: Path) -> None:
    path = write(tmp_path, EXAMPLE.read_text())
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    write_speed(link, "l4", 1.25, "cpu16")
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    before, after = EXAMPLE.read_text().splitlines(), path.read_text().splitlines()
    assert len(before) == len(after)
    assert len([1 for one, other in zip(before, after, strict=True) if one != other]) == 1
    (l4,) = (each for each in load_cluster(path).node_types if each.name == "l4")
    assert l4.speed == 1.25


@pytest.mark.parametrize(
    ("text", "node_type", "problem"),
    [
        (BLOCK, "new", "cannot be changed alone"),  # twin is the same mapping
        (BLOCK, "none", "no entry none"),
        (BLOCK.replace("empty: {}", "empty:"), "empty", "no entry empty"),
        (BLOCK.replace("twin: *new", "twin: {<<: *new, speed: 3}").replace("old:", "older:"), "twin", "no entry old"),
        ("metadata: {raytide: 5}", "old", "that can be read"),
        ("a: [", "old", "that can be read"),
    ],
)
def test_an_entry_that_cannot_be_changed_alone_is_left(tmp_path: Path, text: str, node_type: str, problem: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=problem):
        write_speed(path, node_type, 2.0, "old")
    assert path.read_bytes() == text.encode()


def test_a_merged_entry_gets_its_own_speed(tmp_path: Path) -> None:
    text = BLOCK.replace("twin: *new", "twin: {<<: *new, zones: [a]}")
    path = write(tmp_path, text)
    write_speed(path, "twin", 2.0, "empty")
    types = yaml.safe_load(path.read_text())["metadata"]["raytide"]["node_types"]
    assert (types["twin"], "speed" in types["new"]) == ({"price_usd_h": 4.0, "zones": ["a"], "speed": 2.0}, False)
