"""What `raytide run` and `rt.run` submit: a script, its gang and its working directory, from how a user says them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from raytide.core.errors import UsageError
from raytide.core.objects.gang import Shape

_SHAPE = re.compile(r"(?:(?:(\d+):)?(\d+)x)?([^@]+)(?:@(.+))?")


def command_of(script: str, args: Sequence[str], working_dir: Path) -> tuple[str, ...]:
    """What runs on the members, where the working directory is the current one.

    A `.py` file below it runs in Python, another file as it is; what is no file is a command, like `python` itself.
    """
    path = next((each for each in (Path(script), working_dir / script) if each.is_file()), None)
    if path is None:
        if script.endswith(".py") or os.sep in script or shutil.which(script) is None:
            raise UsageError(f"{script} is neither a file nor a command.", hint="Check the path.")
        return (script, *args)
    below = _below(os.path.abspath(path), os.path.abspath(working_dir))  # what is a link below it is uploaded, too
    below = below or _below(os.path.realpath(path), os.path.realpath(working_dir))
    if below is None:
        raise UsageError(
            f"{script} is not below the working directory {working_dir}.",
            hint="Name a --working-dir that holds it: only that is uploaded.",
        )
    if path.suffix == ".py":
        return ("python", below, *args)
    if not os.access(path, os.X_OK):
        raise UsageError(f"{script} cannot be executed.", hint=f"`chmod +x {script}`, or name its interpreter first.")
    return (f"./{below}", *args)


def _below(path: str, folder: str) -> str | None:
    return Path(path).relative_to(folder).as_posix() if Path(path).is_relative_to(folder) else None


def shapes_of(
    shapes: Sequence[Shape],
    *,
    gpus: float,
    cpus: float | None,
    nodes: int | tuple[int, int],
    selector: Mapping[str, str] | None,
) -> tuple[Shape, ...]:
    """Those, or the one that the others say."""
    if shapes and (gpus or cpus is not None or nodes not in (1, (1, 1)) or selector):
        raise UsageError(
            "shapes and gpus, cpus, nodes or select exclude each other.",
            hint="Say all of it in the shape: 2xGPU:8,CPU:16@KEY=VALUE.",
        )
    return tuple(shapes) or (shape(gpus=gpus, cpus=cpus, nodes=nodes, selector=selector),)


def shape(
    *,
    gpus: float = 0.0,
    cpus: float | None = None,
    nodes: int | tuple[int, int] = 1,
    selector: Mapping[str, str] | None = None,
) -> Shape:
    """So many nodes (or between so many) with so much on each; one CPU where nothing is said."""
    least, most = (nodes, nodes) if isinstance(nodes, int) else nodes
    resources = {"GPU": float(gpus)} if gpus else {}
    if cpus is not None or not gpus:
        resources["CPU"] = 1.0 if cpus is None else float(cpus)
    fields = {"members": most, "min_members": least, "resources": resources, "labels": dict(selector or {})}
    return Shape.parse(fields, where="shape")


def shape_of(text: str) -> Shape:
    """`2xGPU:8,CPU:16@ray.io/accelerator-type=H100`: two nodes with so much on each, and labels that they must have;
    `1:2x...` is elastic."""
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
    """`KEY=VALUE` options."""
    found = dict(text.partition("=")[::2] for text in texts)
    if odd := next((text for text in texts if not text.partition("=")[0] or "=" not in text), None):
        raise UsageError(f"{option} {odd} is not KEY=VALUE.")
    return found


def between(text: str, option: str) -> tuple[int, int]:
    """`2` or `1:4`."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high.isdecimal() or ":" not in text)):
        raise UsageError(f"{option} {text} is no number.", hint="Write 2, or 1:4 for what is elastic.")
    least, most = int(low), int(high or low)
    if not 1 <= least <= most:
        raise UsageError(f"{option} {text} is no range from 1 on.", hint="Write 2, or 1:4 for what is elastic.")
    return least, most


def _pair(text: str, mark: str, whole: str) -> tuple[str, str]:
    key, found, value = text.strip().partition(mark)
    if not (key and found and value):
        raise _no_shape(whole)
    return key, value


def _no_shape(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is no shape.", hint="Write 2xGPU:8,CPU:16, and after it @ray.io/accelerator-type=H100 if need be."
    )
