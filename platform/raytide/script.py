"""What `raytide run` and `rt.run` submit: a script, its gang and its working directory, from how a user says them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from raytide.core.errors import UsageError
from raytide.core.gang import Shape

_SHAPE = re.compile(r"(?:(?:(\d+):)?(\d+)x)?([^@]+)(?:@(.+))?")


def command_of(script: str, args: Sequence[str], working_dir: Path) -> tuple[str, ...]:
    """What runs on the members, where the working directory is the current one.

    A `.py` file below it runs in Python, another file as it is; what is no file is a command, like `python` itself.
    """
    path = Path(script)
    if not path.is_file():
        if path.suffix == ".py" or os.sep in script or shutil.which(script) is None:
            raise UsageError(f"{script} is neither a file nor a command.", hint="Check the path.")
        return (script, *args)
    if not path.resolve().is_relative_to(working_dir.resolve()):
        raise UsageError(
            f"{script} is not below the working directory {working_dir}.",
            hint="Name a --working-dir that holds it: only that is uploaded.",
        )
    below = path.resolve().relative_to(working_dir.resolve()).as_posix()
    if path.suffix == ".py":
        return ("python", below, *args)
    if not os.access(path, os.X_OK):
        raise UsageError(f"{script} cannot be executed.", hint=f"`chmod +x {script}`, or name its interpreter first.")
    return (f"./{below}", *args)


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
    if not (low.isdigit() and (high.isdigit() or ":" not in text)):
        raise UsageError(f"{option} {text} is no number.", hint="Write 2, or 1:4 for what is elastic.")
    return int(low), int(high or low)


def _pair(text: str, mark: str, whole: str) -> tuple[str, str]:
    key, found, value = text.strip().partition(mark)
    if not (key and found and value):
        raise _no_shape(whole)
    return key, value


def _no_shape(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is no shape.", hint="Write 2xGPU:8,CPU:16, and after it @ray.io/accelerator-type=H100 if need be."
    )
