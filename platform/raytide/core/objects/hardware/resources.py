"""The keywords that state the resources of each node. They are the same in the SDK, on the command line and in specs.

    gpus="H100:8"       8 whole GPUs of this model; 8: 8 GPUs of any model; 0.5: half a GPU
    cpus=16             CPUs
    memory="64GiB"      bytes, or a text with a unit
    nodes=(1, 4)        the number of such nodes; a range makes the gang elastic
    spot=True           spot capacity only; False: on-demand only; None: whichever costs less
    labels={...}        a label selector for the nodes

A `Shape` and a `ServeSpec` store these values in Ray's form: resources by name and a label selector.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from raytide.core.errors import UsageError
from raytide.core.objects.node import ACCELERATOR_LABEL, MARKET_LABEL, TYPE_LABEL, CapacityType, NodeType

RESOURCE_WORDS = frozenset({"gpus", "cpus", "memory", "spot"})
NODE_WORDS = RESOURCE_WORDS | {"nodes"}

_GPUS = re.compile(r"(?:(?P<model>[A-Za-z][\w .-]*?)(?::(?P<count>[\d.]+))?|(?P<plain>[\d.]+))")
_MEMORY = re.compile(r"(?P<amount>\d+(?:\.\d+)?)\s*(?P<prefix>[kKMGT]?)(?P<binary>i?)B?")
_PREFIXES = ("", "K", "M", "G", "T")


def expand(fields: Mapping[str, object], words: frozenset[str] = NODE_WORDS) -> dict[str, Any]:
    """Returns the fields of a spec with the resource keywords (`words`) replaced. `nodes` becomes `members` and
    `min_members`. The other keywords become entries of `resources` and `labels`. Fields without any keyword are
    returned unchanged.

    If `cpus` is left out and nothing but memory is requested, each node is asked for one CPU. Raises ValueError for a
    malformed value, and for a keyword that repeats an entry of `resources`, `labels` or `members`.
    """
    if not words & fields.keys():
        return dict(fields)
    rest = {key: value for key, value in fields.items() if key not in words}
    resources, labels = _mapping(rest, "resources"), _mapping(rest, "labels")
    if (gpus := fields.get("gpus")) is not None:
        count, model = parse_gpus(gpus)
        if count:
            _add(resources, "GPU", count, "gpus")
        if model:
            _add(labels, ACCELERATOR_LABEL, model, "gpus")
    if (cpus := fields.get("cpus")) is not None:
        _add(resources, "CPU", _number(cpus, "cpus"), "cpus")
    elif not any(amount for name, amount in resources.items() if name != "memory"):
        resources["CPU"] = 1.0
    if (memory := fields.get("memory")) is not None:
        _add(resources, "memory", bytes_of(memory), "memory")
    if (spot := fields.get("spot")) is not None:
        if not isinstance(spot, bool):
            raise ValueError("spot is true, false, or left out for either")
        _add(labels, MARKET_LABEL, str(CapacityType.SPOT if spot else CapacityType.ON_DEMAND), "spot")
    if "nodes" in words and (nodes := fields.get("nodes")) is not None:
        if "members" in rest or "min_members" in rest:
            raise ValueError("nodes and members mean the same: leave one of them out")
        rest["min_members"], rest["members"] = _range(nodes)
    return {**rest, "resources": {name: amount for name, amount in resources.items() if amount}, "labels": labels}


def parse_gpus(text: object) -> tuple[float, str]:
    """Parses a number of GPUs, such as `8`, `H100` or `H100:8`. Returns the number, and the accelerator's name before
    the colon. The name is empty if the value has no name. The number is 1 if the value is only a name.
    """
    found = None if isinstance(text, bool) else _GPUS.fullmatch(str(text).strip())
    try:
        count = float((found["count"] or found["plain"] or 1) if found else "")
    except ValueError:
        raise ValueError(f"gpus {text!r} is not a number of GPUs: write 8, H100 or H100:8") from None
    return count, (found["model"] or "") if found else ""


def bytes_of(memory: object) -> float:
    """Returns the number of bytes that `memory` stands for. `memory` is a number, or a text such as 64GiB or 500MB."""
    found = None if isinstance(memory, bool) else _MEMORY.fullmatch(f"{memory}".strip())
    if isinstance(memory, float | int) and not isinstance(memory, bool) and memory >= 0:
        return float(memory)
    if found is None:
        raise ValueError(f"memory {memory!r} is not an amount: write 64GiB, or a number of bytes")
    base = 1024 if found["binary"] else 1000
    return float(found["amount"]) * float(base ** _PREFIXES.index(found["prefix"].upper()))


def resolve_accelerator(labels: Mapping[str, str], node_types: Iterable[NodeType]) -> dict[str, str]:
    """Resolves the accelerator's name in a label selector, and returns the new selector. The name may be in upper or
    lower case.

    If the node types' labels contain the name, the selector gets the spelling of these labels. Otherwise, if a node
    type with GPUs has the name, the selector selects this node type. A selector with operators (`!A100`, `in(...)`)
    is not changed.

    Raises UsageError if no label and no node type has the name. The error lists the known accelerators.
    """
    name = labels.get(ACCELERATOR_LABEL, "")
    if not name or name.startswith("!") or "(" in name:
        return dict(labels)
    types = list(node_types)
    models = sorted({model for each in types if (model := each.labels.get(ACCELERATOR_LABEL))})
    if found := next((model for model in models if model.lower() == name.lower()), None):
        return {**labels, ACCELERATOR_LABEL: found}
    rest = {key: value for key, value in labels.items() if key != ACCELERATOR_LABEL}
    with_gpus = sorted(each.name for each in types if each.resources.get("GPU"))
    if found := next((each for each in with_gpus if each.lower() == name.lower()), None):
        return {**rest, TYPE_LABEL: found}
    known = [*models, *(each for each in with_gpus if each not in models)]
    raise UsageError(
        f"no node type of this cluster has {name} GPUs.",
        hint=f"It has {', '.join(known)}." if known else "It has no GPUs at all.",
    )


def _mapping(fields: Mapping[str, object], key: str) -> dict[str, object]:
    value = fields.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is a mapping")
    return dict(value)


def _add(target: dict[str, object], key: str, value: object, word: str) -> None:
    if key in target and target[key] != value:
        raise ValueError(f"{word} and {key} exclude each other")
    target[key] = value


def _number(value: object, word: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise ValueError(f"{word} {value!r} is not a number") from None


def _range(nodes: object) -> tuple[object, object]:
    """Returns the smallest and the largest number of nodes."""
    if isinstance(nodes, str):
        low, _, high = nodes.partition(":")
        nodes = (low, high or low)
    if isinstance(nodes, list | tuple):
        if len(nodes) != 2:
            raise ValueError("nodes is a number, or the least and the most")
        return nodes[0], nodes[1]
    return nodes, nodes
