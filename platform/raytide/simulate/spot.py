"""Recorded spot markets: at each tick, how many nodes of one kind could be had in one zone.

A file is a JSON object from a trace's key to its fields, the counts run-length encoded as [count, ticks] pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from raytide.core.errors import DataError

_MOST_NODES = 1_000_000
USUAL = ("v100", 1)
"""The GPU and GPUs of a node that are meant where traces of several match and none was named."""


class _Recorded(BaseModel):
    """One entry of the file; other fields are left alone, recorded prices too: simulations have one price a market."""

    kind: str
    collection: str
    zone: str
    gpu: str
    gpus_per_node: int = Field(ge=1)
    gap_seconds: float = Field(gt=0, allow_inf_nan=False)
    rle: list[tuple[Annotated[float, Field(ge=0, le=_MOST_NODES)], Annotated[int, Field(ge=1)]]] = Field(min_length=1)


@dataclass(frozen=True, slots=True, eq=False)
class SpotTrace:
    """One zone's market for one kind of node."""

    key: str
    kind: str
    """`availability`: a node could be had; `preemption`: a node that was held lived."""
    collection: str
    zone: str
    gpu: str
    gpus_per_node: int
    gap_s: float
    nodes: NDArray[np.int64]
    """How many could be had, one number for each tick of `gap_s`."""


def read(path: Path) -> tuple[SpotTrace, ...]:
    """Every trace of the file, in its order."""
    try:
        entries = TypeAdapter(dict[str, _Recorded]).validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "(top)"
        raise DataError(f"{path}: {where}: {first['msg']}.", hint="It is no file of spot traces.") from None
    return tuple(_trace(key, entry) for key, entry in entries.items())


def select(
    traces: Sequence[SpotTrace],
    collection: str,
    *,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    kind: str | None = None,
    zones: Sequence[str] = (),
) -> tuple[SpotTrace, ...]:
    """Those whose key contains `collection`, one for each zone, with one gap; in the order of `zones`, when given.

    Raises DataError for a zone or a collection that is not there, and when what is left is ambiguous.
    """
    found = [
        trace
        for trace in traces
        if collection in trace.key
        and gpu in (None, trace.gpu)
        and gpus_per_node in (None, trace.gpus_per_node)
        and kind in (None, trace.kind)
    ]
    if gpu is None and gpus_per_node is None and any((trace.gpu, trace.gpus_per_node) == USUAL for trace in found):
        found = [trace for trace in found if (trace.gpu, trace.gpus_per_node) == USUAL]
    there = sorted({trace.zone for trace in found})
    wanted = list(dict.fromkeys(zones)) or there
    missing = [zone for zone in wanted if zone not in there]
    if not there:
        raise _not_there(traces, collection)
    if missing:
        raise DataError(
            f"no spot trace of {collection!r} in {', '.join(missing)}.", hint=f"There are: {', '.join(there)}."
        )
    chosen = [trace for zone in wanted for trace in found if trace.zone == zone]
    if len(chosen) > len(wanted):
        twice = [trace.key for trace in chosen if trace.zone == chosen[0].zone]
        raise DataError(
            f"several traces for zone {chosen[0].zone}: {', '.join(twice)}.",
            hint=f"Name more of the key, such as {twice[0].rpartition('/')[0] or twice[0]}, or the GPU.",
        )
    if len({trace.gap_s for trace in chosen}) > 1:
        gaps = ", ".join(f"{trace.key} ({trace.gap_s:g} s)" for trace in chosen)
        raise DataError(f"traces with different gaps: {gaps}.", hint="Name more of the key, so that one gap is left.")
    return tuple(chosen)


def _not_there(traces: Sequence[SpotTrace], collection: str) -> DataError:
    named = [trace for trace in traces if collection in trace.key]
    kinds = sorted({f"{trace.kind} of {trace.gpu} x {trace.gpus_per_node}" for trace in named})
    if kinds:
        return DataError(f"{collection!r} has no trace of that kind, GPU and size.", hint=f"It has {', '.join(kinds)}.")
    known = ", ".join(sorted({trace.collection for trace in traces})) or "none"
    return DataError(f"no spot trace of {collection!r}.", hint=f"The collections are: {known}.")


def stacked(traces: Sequence[SpotTrace]) -> NDArray[np.int64]:
    """Nodes by [zone, tick], as long as the shortest trace."""
    ticks = min(len(trace.nodes) for trace in traces)
    return np.stack([trace.nodes[:ticks] for trace in traces])


def _trace(key: str, entry: _Recorded) -> SpotTrace:
    counts, ticks = zip(*entry.rle, strict=True)
    nodes = np.repeat(np.asarray(counts, dtype=np.float64), ticks).astype(np.int64)
    return SpotTrace(
        key, entry.kind, entry.collection, entry.zone, entry.gpu, entry.gpus_per_node, entry.gap_seconds, nodes
    )
