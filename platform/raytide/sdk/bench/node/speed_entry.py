"""Writes a measured `speed` into a node type's entry in cluster.yaml. All other text of the file stays unchanged."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raytide.core.errors import ConfigError
from raytide.core.io.atomic_file import write_text

_WHERE = ("metadata", "raytide", "node_types")
_KEY = "speed"
_BY_HAND = "Write it by hand: `speed: NUMBER` in metadata.raytide.node_types.TYPE."
_ROUNDING = 3


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """A change of a node type's `speed`. `before` is None if the entry had no `speed`, which counts as 1."""

    path: Path
    node_type: str
    before: float | None
    after: float

    def __str__(self) -> str:
        before = "speed was not set" if self.before is None else f"speed was {self.before:g}"
        return f"{self.path}: metadata.raytide.node_types.{self.node_type}: {before}, and is {self.after:g} now."


def write_speed(path: Path, node_type: str, ratio: float, reference: str) -> SpeedChange:
    """Sets the `speed` of `node_type` to `ratio` times the `speed` of `reference`. Replaces the file atomically.

    Raises ConfigError if the entry cannot be found, or if the change would affect other entries too. The file is
    then unchanged.
    """
    path = path.resolve()  # a link stays one
    with path.open(encoding="utf-8", newline="") as file:
        text = file.read()
    types = _types(text, path)
    if missing := [name for name in (node_type, reference) if not isinstance(types.get(name), Mapping)]:
        raise ConfigError(f"{path} has no entry {missing[0]} in {'.'.join(_WHERE)}.", hint=_BY_HAND)
    before = types[node_type].get(_KEY)
    after = round(ratio * float(types[reference].get(_KEY, 1.0)), _ROUNDING)
    changed = _with_speed(text, path, node_type, after)
    wanted = {**types, node_type: {**types[node_type], _KEY: after}}
    if _types(changed, path) != wanted or _without(changed) != _without(text):
        raise ConfigError(f"the entry {node_type} of {path} cannot be changed alone.", hint=_BY_HAND)
    mode = stat.S_IMODE(path.stat().st_mode)
    write_text(path, changed, mode=mode)
    path.chmod(mode)  # the umask may have taken some of it from the new file
    return SpeedChange(path, node_type, before, after)


def _with_speed(text: str, path: Path, node_type: str, speed: float) -> str:
    """Returns the text with the speed in place of the old one, or as the first field of the entry."""
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for name in (*_WHERE, node_type):
        node = next((value for key, value in node.value if key.value == name), None)
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path} has no mapping {name} of its own.", hint=_BY_HAND)
    old = next((value for key, value in node.value if key.value == _KEY), None)
    if old is not None:
        return f"{text[: old.start_mark.index]}{speed:g}{text[old.end_mark.index :]}"
    if not node.value:  # {}
        return f"{text[: node.start_mark.index]}{{{_KEY}: {speed:g}}}{text[node.end_mark.index :]}"
    start = node.value[0][0].start_mark
    newline = "\r\n" if "\r\n" in text else "\n"
    after = ", " if node.flow_style else f"{newline}{' ' * start.column}"
    return f"{text[: start.index]}{_KEY}: {speed:g}{after}{text[start.index :]}"


def _types(text: str, path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text)
        for name in _WHERE:
            found = found[name]
        return dict(found)
    except (yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} has no {'.'.join(_WHERE)} that can be read.", hint=_BY_HAND) from error


def _without(text: str) -> Any:
    """Returns the content of the file without the entries of node types."""
    found = yaml.safe_load(text)
    del found["metadata"]["raytide"]["node_types"]
    return found
