"""The command `logs`, which prints the output of a job's driver or of an endpoint's replicas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json
from raytide.control.client import ApiClient
from raytide.core.errors import UsageError
from raytide.sdk.jobs.job_run import Run, patiently
from raytide.sdk.serving.endpoint import EndpointHandle

_JOB = re.compile(r"job-[0-9]+")


def logs(
    name: Annotated[str, typer.Argument(metavar="JOB|ENDPOINT", help="A job of `raytide ps`, or an endpoint.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output: of a job until it ends, else until Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option("--tail", "-n", min=0, help="Only this many last lines, out of the last 32 MiB; of each replica."),
    ] = None,
    grep: Annotated[str, typer.Option("--grep", "-g", help="Only lines that contain this regular expression.")] = "",
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Print the output of a job's driver, or of an endpoint's replicas.

    The output of an endpoint includes replicas that have ended. Each line begins with the replica's name. Texts that
    look like secrets are removed.
    """
    client = ApiClient.find(cluster)
    is_job = _JOB.fullmatch(name) is not None
    texts = (_of_job if is_job else _of_endpoint)(client, name, follow, tail, grep)
    if json:
        as_json({"job" if is_job else "endpoint": name, "logs": "".join(texts)})
        return
    for text in texts:
        print(text, end="", flush=True)


def _of_job(client: ApiClient, job_id: str, follow: bool, tail: int | None, grep: str) -> Iterator[str]:
    look = partial(client.job, job_id)
    job = Run(client, patiently(job_id, look) if follow else look())
    texts = job.logs(follow=True, tail=tail) if follow else (part.text for part in job.log_parts(tail=tail))
    return _with(texts, grep) if grep else iter(texts)


def _of_endpoint(client: ApiClient, name: str, follow: bool, tail: int | None, grep: str) -> Iterator[str]:
    endpoint = EndpointHandle(client, client.endpoint(name))
    return (line + "\n" for line in endpoint.logs(follow=follow, tail=tail, grep=grep))


def _with(texts: Iterable[str], grep: str) -> Iterator[str]:
    """Yields the lines of the texts in which the regular expression matches. Raises UsageError if it is malformed."""
    try:
        wanted = re.compile(grep)
    except re.error as error:
        raise UsageError(f"{grep!r} is not a regular expression: {error}.") from None
    begun = ""
    for text in texts:
        *lines, begun = (begun + text).split("\n")
        yield from (line + "\n" for line in lines if wanted.search(line))
    if begun and wanted.search(begun):
        yield begun
