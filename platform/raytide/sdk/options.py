"""The keyword arguments of jobs and endpoints. They are typed, so that editors complete them and mypy checks them.

`raytide.core.objects.hardware.resources` explains the keywords for resources (gpus, cpus, memory, nodes, spot, labels).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypedDict

from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.hardware.resources import NODE_WORDS
from raytide.core.objects.job import BudgetPer


class JobOptions(TypedDict, total=False):
    """Options of a job that concern the queue."""

    name: str
    team: str | None
    """The job's team; the token's own by default."""
    priority: str
    """A priority class of `metadata.raytide.priorities`; without those: "low", "normal" or "high"."""
    preemptible: bool | None
    """True if the queue may ask the job to checkpoint and free its nodes; None allows that for training only."""
    deadline: datetime | timedelta | str | float | None
    """A time with a zone, a duration such as "8h", or seconds from now."""
    estimate_h: float | None
    """The estimated hours of work on the whole gang, used until the job reports its progress."""
    budget_usd: float | None
    soft_budget_usd: float | None
    """A limit beyond which the job gets spot nodes only, and borrows no quota."""
    budget_per: BudgetPer
    tags: Mapping[str, str]
    """The job's own labels, by which costs can be grouped: {"project": "search"}."""
    max_restarts: int


class NodeOptions(JobOptions, total=False):
    """Options of a job that runs on one node, including the node's resources."""

    gpus: float | str
    cpus: float
    memory: float | str
    spot: bool | None
    labels: Mapping[str, str]
    """A label selector for the nodes."""
    resources: Mapping[str, float]
    """Other resources of Ray, by name."""


class GangOptions(NodeOptions, total=False):
    """Options of a job that runs on a gang of nodes."""

    nodes: int | tuple[int, int]
    """The number of nodes; `(1, 4)` runs with any number from 1 to 4."""
    gpu_memory_gb: float
    """The least memory of each GPU, in 10^9 bytes."""
    together: str
    """A node label, such as a rack or zone, of which all nodes must have the same value."""
    shapes: Sequence[Shape]
    """Alternative shapes in order of preference, in place of the options above."""


class ServeOptions(TypedDict, total=False):
    """Options of an endpoint, apart from its model and replicas."""

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
    pip: Sequence[str]
    max_ongoing: int
    min_request_priority: int
    prefill: Mapping[str, object]


_SHAPE_WORDS = (*sorted(NODE_WORDS), "labels", "resources", "gpu_memory_gb", "together")


def job_and_gang(
    options: GangOptions | NodeOptions | JobOptions,
) -> tuple[dict[str, object], dict[str, object] | None]:
    """Splits options into the fields of a JobSpec and the fields of a GangSpec. The second result is None if no
    resources are given.

    Options that are None are left out, so that the defaults apply.
    """
    given = {key: value for key, value in options.items() if value is not None}
    gang = {key: given.pop(key) for key in _SHAPE_WORDS if key in given}
    if shapes := given.pop("shapes", None):
        gang["shapes"] = shapes
    if (tags := given.pop("tags", None)) is not None:
        given["labels"] = tags
    return given, gang or None


def gang_of(fields: dict[str, object] | None, *, where: str) -> GangSpec:
    """Returns the gang with these fields. If there are no fields, the gang is one node with one CPU.

    Raises ConfigError, which names `where`, if the fields are invalid.
    """
    return GangSpec.parse(fields or {"cpus": 1}, where=where)
