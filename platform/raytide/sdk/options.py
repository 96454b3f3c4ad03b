"""The keyword arguments that jobs and endpoints take, typed, so that editors complete them and mypy checks them.

The words for resources (gpus, cpus, memory, nodes, spot, labels) are explained in `raytide.core.objects.resources`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypedDict

from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import BudgetPer
from raytide.core.objects.resources import NODE_WORDS

__all__ = ["GangOptions", "JobOptions", "NodeOptions", "ServeOptions", "job_and_gang"]


class JobOptions(TypedDict, total=False):
    """What the queue is told of a job."""

    name: str
    team: str | None
    """The token's own team where it is left out."""
    priority: str
    """A class of `metadata.raytide.priorities`: "low", "normal" or "high" unless the cluster names others."""
    preemptible: bool | None
    """Whether the queue may ask the job to checkpoint and free its nodes; None: training may be asked, nothing else."""
    deadline: datetime | timedelta | str | float | None
    """A time with a zone, a duration such as "8h", or seconds from now."""
    estimate_h: float | None
    """Hours of work on the whole gang, until the job itself reports what is left."""
    budget_usd: float | None
    soft_budget_usd: float | None
    """Beyond it the job gets spot nodes only, and borrows no quota."""
    budget_per: BudgetPer
    tags: Mapping[str, str]
    """The job's own labels, by which costs can be grouped: {"project": "search"}."""
    max_restarts: int


class NodeOptions(JobOptions, total=False):
    """What one node must have."""

    gpus: float | str
    cpus: float
    memory: float | str
    spot: bool | None
    labels: Mapping[str, str]
    """A label selector for the nodes."""
    resources: Mapping[str, float]
    """Other resources of Ray, by name."""


class GangOptions(NodeOptions, total=False):
    """What the nodes of a gang must have."""

    nodes: int | tuple[int, int]
    """How many; `(1, 4)` starts and goes on with any number between."""
    together: str
    """A node label (rack, zone): all nodes have one value of it."""
    shapes: Sequence[Shape]
    """Several forms, in order of preference, in place of the words above."""


class ServeOptions(TypedDict, total=False):
    """What an endpoint is told, besides its model and replicas."""

    team: str
    priority: str
    project: str
    gpus: float | str
    cpus: float
    memory: float | str
    spot: bool | None
    labels: Mapping[str, str]
    resources: Mapping[str, float]
    members: int
    engine: Mapping[str, object]
    max_ongoing: int
    min_request_priority: int


_SHAPE_WORDS = (*sorted(NODE_WORDS), "labels", "resources", "together")


def job_and_gang(
    options: GangOptions | NodeOptions | JobOptions,
) -> tuple[dict[str, object], dict[str, object] | None]:
    """Returns the options as fields of a JobSpec, and as those of a GangSpec; None for the latter where none was given.

    Options that are None are left out: they ask for the default.
    """
    given = {key: value for key, value in options.items() if value is not None}
    gang = {key: given.pop(key) for key in _SHAPE_WORDS if key in given}
    if shapes := given.pop("shapes", None):
        gang["shapes"] = shapes
    if (tags := given.pop("tags", None)) is not None:
        given["labels"] = tags
    return given, gang or None


def gang_of(fields: dict[str, object] | None, *, where: str) -> GangSpec:
    """Returns the gang of these fields; one node with one CPU without any."""
    return GangSpec.parse(fields or {"cpus": 1}, where=where)
