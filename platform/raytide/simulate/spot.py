"""Recorded spot markets: how many nodes of one kind were available in one zone, tick by tick.

A file is a JSON object that maps each trace's key to the trace's fields. The node counts are run-length encoded as
[count, ticks] pairs.
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
"""The default GPU and number of GPUs per node, if traces of several match."""


class _Recorded(BaseModel):
    """One entry of the file. Other fields are ignored, including recorded prices, since simulations use one price per
    market.
    """

    kind: str
    collection: str
    zone: str
    gpu: str
    gpus_per_node: int = Field(ge=1)
    gap_seconds: float = Field(gt=0, allow_inf_nan=False)
    rle: list[tuple[Annotated[float, Field(ge=0, le=_MOST_NODES)], Annotated[int, Field(ge=1)]]] = Field(min_length=1)


@dataclass(frozen=True, slots=True, eq=False)
class SpotTrace:
    """The recorded market of one zone, for nodes with a given kind and number of GPUs."""

    key: str
    kind: str
    """`availability`: a node could be bought; `preemption`: a held node was alive."""
    collection: str
    zone: str
    gpu: str
    gpus_per_node: int
    gap_s: float
    nodes: NDArray[np.int64]
    """The number of available nodes at each tick of `gap_s` seconds."""


def read(path: Path) -> tuple[SpotTrace, ...]:
    """Returns all traces in the file, in order."""
    try:
        entries = TypeAdapter(dict[str, _Recorded]).validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "(top)"
        raise DataError(f"{path}: {where}: {first['msg']}.", hint="This is not a file of spot traces.") from None
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
    """Returns the traces whose key contains `collection`, one trace per zone, in the order of `zones`.

    All returned traces have the same seconds per tick. Raises DataError if the collection or a zone has no matching
    trace, if a zone has several matching traces, or if the traces differ in their seconds per tick.
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
            hint=f"Give more of the key, such as {twice[0].rpartition('/')[0] or twice[0]}, or the GPU.",
        )
    if len({trace.gap_s for trace in chosen}) > 1:
        gaps = ", ".join(f"{trace.key} ({trace.gap_s:g} s)" for trace in chosen)
        raise DataError(f"traces with different gaps: {gaps}.", hint="Give more of the key, until one gap is left.")
    return tuple(chosen)


def _not_there(traces: Sequence[SpotTrace], collection: str) -> DataError:
    named = [trace for trace in traces if collection in trace.key]
    kinds = sorted({f"{trace.kind} of {trace.gpu} x {trace.gpus_per_node}" for trace in named})
    if kinds:
        return DataError(f"{collection!r} has no trace of that kind, GPU and size.", hint=f"It has {', '.join(kinds)}.")
    known = ", ".join(sorted({trace.collection for trace in traces})) or "none"
    return DataError(f"no spot trace of {collection!r}.", hint=f"The collections are: {known}.")


def stacked(traces: Sequence[SpotTrace]) -> NDArray[np.int64]:
    """Returns the number of available nodes as an array [zone, tick]. All traces are cut to the length of the shortest
    one.
    """
    ticks = min(len(trace.nodes) for trace in traces)
    return np.stack([trace.nodes[:ticks] for trace in traces])


def _trace(key: str, entry: _Recorded) -> SpotTrace:
    counts, ticks = zip(*entry.rle, strict=True)
    nodes = np.repeat(np.asarray(counts, dtype=np.float64), ticks).astype(np.int64)
    return SpotTrace(
        key, entry.kind, entry.collection, entry.zone, entry.gpu, entry.gpus_per_node, entry.gap_seconds, nodes
    )
