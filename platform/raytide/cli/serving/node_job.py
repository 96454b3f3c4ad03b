"""Measures a node type in a job. The job waits in the queue for whole nodes of the type and is charged for them."""

from __future__ import annotations

from contextlib import suppress

from raytide.core.errors import NotFoundError, RaytideError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.objects.node import TYPE_LABEL, NodeType
from raytide.core.specs.script import ScriptSpec
from raytide.sdk.bench.node.report import NodeReport, parse_report
from raytide.sdk.client import Client
from raytide.sdk.jobs.job_run import Run

WHOLE = ("CPU", "GPU")
"""The resources that the job takes completely on each node, so that nothing else runs there."""


def measure(
    client: Client, name: str, *, nodes: int = 1, seconds: float = 2.0, disk_mib: int = 512, timeout_s: float = 3600.0
) -> NodeReport:
    """Measures nodes of a type and returns the results. The job is stopped if nobody waits for it any longer, such as
    after an interrupt. Raises NotFoundError for an unknown type.
    """
    node_type = type_of(client, name)
    view = client.client.submit(job_of(node_type, nodes, seconds, disk_mib))
    run = Run(client.client, view)
    try:
        run.wait(timeout_s=timeout_s)
    except BaseException:
        with suppress(RaytideError):
            run.stop()
        raise
    return parse_report(name, run.id, run.logs(), nodes)


def job_of(node_type: NodeType, nodes: int, seconds: float, disk_mib: int) -> JobSpec:
    """Returns the spec of the measuring job, which runs one process on each of `nodes` whole nodes."""
    command = ("python", "-m", "raytide.sdk.bench.node.measure", str(seconds), str(disk_mib))
    script = ScriptSpec.parse({"command": command}, where="bench node")
    resources = {name: amount for name, amount in node_type.resources.items() if name in WHOLE and amount}
    shape = Shape(members=nodes, resources=resources, labels={TYPE_LABEL: node_type.name})
    fields = {"kind": JobKind.SCRIPT, "name": f"bench-{node_type.name}", "gang": GangSpec(shapes=(shape,))}
    return JobSpec.parse({**fields, "config": script.model_dump(mode="json")}, where="bench node")


def type_of(client: Client, name: str) -> NodeType:
    types = {each.name: each for each in client.client.snapshot().node_types}
    if name not in types:
        raise NotFoundError(f"there is no node type {name}.", hint=f"There are {', '.join(sorted(types))}.")
    return types[name]
