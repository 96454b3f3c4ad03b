"""Builds the command of a script job. Parses shapes, ranges and pairs from command-line arguments."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from raytide.core.errors import UsageError
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.gang import Shape
from raytide.core.objects.hardware.resources import RESOURCE_WORDS, expand

_SHAPE = re.compile(r"(?:(?:(\d+):)?(\d+)x)?([^@]+)(?:@(.+))?")


def command_of(script: str, args: Sequence[str], working_dir: Path) -> tuple[str, ...]:
    """Returns the command that each gang member runs in the working directory.

    A `.py` file is run by Python. Any other file is executed. A name that is not a file is a command, such as `python`.
    Raises UsageError if the command cannot be run.
    """
    path = next((each for each in (Path(script), working_dir / script) if each.is_file()), None)
    if path is None:
        if script.endswith(".py") or os.sep in script or shutil.which(script) is None:
            raise UsageError(f"{script} is neither a file nor a command.", hint="Check the path.")
        return (script, *args)
    below = _below(os.path.abspath(path), os.path.abspath(working_dir))  # links below it are uploaded too
    below = below or _below(os.path.realpath(path), os.path.realpath(working_dir))
    if below is None:
        raise UsageError(
            f"{script} is not below the working directory {working_dir}.",
            hint="Name a --working-dir that contains it: only that folder is uploaded.",
        )
    if path.suffix == ".py":
        return ("python", below, *args)
    if not os.access(path, os.X_OK):
        raise UsageError(f"{script} cannot be executed.", hint=f"`chmod +x {script}`, or name its interpreter first.")
    return (f"./{below}", *args)


def _below(path: str, folder: str) -> str | None:
    return Path(path).relative_to(folder).as_posix() if Path(path).is_relative_to(folder) else None


def with_resources(spec: ServeSpec, words: Mapping[str, object]) -> ServeSpec:
    """Sets resources and labels of a spec from keywords such as `gpus`, and returns the new spec.

    Raises UsageError for invalid keywords.
    """
    if not words:
        return spec
    try:
        asked = expand({"cpus": 0, **words}, RESOURCE_WORDS)
    except ValueError as error:
        raise UsageError(f"{error}.") from None
    own = dict(spec.resources) if "resources" in spec.model_fields_set else {}
    for word, resource in (("gpus", "GPU"), ("cpus", "CPU"), ("memory", "memory")):
        if word in words:
            own.pop(resource, None)
    resources = {**own, **asked["resources"]} or {"CPU": 1.0}
    given = spec.model_dump(exclude_unset=True)  # a default team must not become a named one
    fields = {**given, "resources": resources, "labels": {**spec.labels, **asked["labels"]}}
    return ServeSpec.parse(fields, where=spec.name)


def parse_shape(text: str) -> Shape:
    """Returns the shape that a text describes.

    `2xGPU:8,CPU:16@ray.io/accelerator-type=H100` means two nodes, each with these resources and this label. `1:2x...`
    is elastic, with one or two nodes. Raises UsageError for any other text.
    """
    found = _SHAPE.fullmatch(text.strip())
    pairs = [_pair(part, ":", text) for part in found[3].split(",")] if found else []
    try:
        resources = {name: float(amount) for name, amount in pairs}
    except ValueError:
        resources = {}
    if found is None or not resources:
        raise _no_shape(text)
    most = int(found[2] or 1)
    labels = dict(_pair(part, "=", text) for part in found[4].split(",")) if found[4] else {}
    fields = {"members": most, "min_members": int(found[1] or most), "resources": resources, "labels": labels}
    return Shape.parse(fields, where=f"shape {text}")


def pairs_of(texts: Sequence[str], option: str) -> dict[str, str]:
    """Parses texts of the form `KEY=VALUE` into a mapping. Raises UsageError, which names `option`, for any other
    text.
    """
    found = dict(text.partition("=")[::2] for text in texts)
    if odd := next((text for text in texts if not text.partition("=")[0] or "=" not in text), None):
        raise UsageError(f"{option} {odd} is not KEY=VALUE.")
    return found


def parse_range(text: str, option: str) -> tuple[int, int]:
    """Returns the minimum and the maximum of a range such as `2` or `1:4`. Raises UsageError, which names `option`, for
    any other text.
    """
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high.isdecimal() or ":" not in text)):
        raise UsageError(f"{option} {text} is not a number.", hint="Write 2, or 1:4 for an elastic number.")
    least, most = int(low), int(high or low)
    if not 1 <= least <= most:
        raise UsageError(
            f"{option} {text} is not a range from 1 upwards.", hint="Write 2, or 1:4 for an elastic number."
        )
    return least, most


def _pair(text: str, mark: str, whole: str) -> tuple[str, str]:
    key, found, value = text.strip().partition(mark)
    if not (key and found and value):
        raise _no_shape(whole)
    return key, value


def _no_shape(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is not a shape.", hint="Write 2xGPU:8,CPU:16, optionally followed by @ray.io/accelerator-type=H100."
    )
