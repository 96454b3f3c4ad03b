"""One gateway process: `python -m raytide.gateway RUN_DIR NUMBER`. Several processes share the port through
SO_REUSEPORT.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from raytide.actors.serving.http.protocol import BoundedHttpTools
from raytide.control.bootstrap.cluster_record import load
from raytide.control.supervision.daemon import hold_lock
from raytide.core.errors import RaytideError
from raytide.core.logs import log_to, logger
from raytide.core.objects.cluster_config import HostedApi, load_cluster
from raytide.core.telemetry.metrics import Sample
from raytide.core.telemetry.other_names import with_other_names
from raytide.core.telemetry.page import MetricsPage, Query
from raytide.core.telemetry.series_limits import SeriesLimits
from raytide.core.telemetry.targets import Target, announce
from raytide.gateway.answers.stored_responses import SharedResponses
from raytide.gateway.app import create_app
from raytide.gateway.batches.service import BatchService
from raytide.gateway.hosted import HostedApis
from raytide.gateway.models import EndpointModels
from raytide.gateway.replicas.directory import Directory, Listing
from raytide.gateway.rollouts.counting import RolloutReporter
from raytide.gateway.tenancy.tenancy import Tenancy
from raytide.gateway.tracing import RequestTracing

log = logger(__name__)

_BACKLOG = 2048
_DRAIN_S = 8
_LISTING_TIMEOUT_S = 30.0
"""The seconds within which the GCS must answer at the start; otherwise the process ends, and the supervisor restarts
it.
"""


def serve(
    gcs_address: str,
    listening: socket.socket,
    name: str,
    tenancy: Tenancy,
    files: Path,
    hosted: Iterable[HostedApi] = (),
    announce_page: Callable[[str], None] = lambda address: None,
    tracing: RequestTracing | None = None,
) -> None:
    """Serves requests until SIGTERM. Then it waits at most a few seconds for the running requests to finish.

    `files` is the folder of uploaded files and batches. `announce_page` is called with the address of the process's
    metrics page. The process accepts connections once it knows which endpoints exist. Until then, the other
    processes on the port get the connections.
    """
    models = EndpointModels(name, HostedApis.from_environment(hosted))

    async def run() -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        listed = asyncio.Event()

        def take_over(listing: Listing) -> None:
            models.update(listing)
            listed.set()

        def update(listing: Listing) -> None:
            loop.call_soon_threadsafe(take_over, listing)

        announce_page(await metrics.start(listening.getsockname()[0]))
        directory = Directory(gcs_address, update)
        directory.start()
        reporter = RolloutReporter(tenancy.api, models.counted)
        work = (models.report_queues(directory), batches.run(), reporter.run(), responses.run())
        tasks = [asyncio.create_task(each) for each in work]
        for task in (*tasks, *tenancy.start()):
            task.add_done_callback(ended)
        async with asyncio.timeout(_LISTING_TIMEOUT_S):
            await listed.wait()
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        directory.stop()
        metrics.close()
        with suppress(RaytideError):
            await reporter.report()
        await models.close()
        await tenancy.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    def ended(task: asyncio.Task[None]) -> None:
        """Ends the process if a background task has ended, because it would answer requests without doing that work.
        The supervisor starts it again.
        """
        if not (task.cancelled() or server.should_exit):
            log.critical("a part of the gateway has ended, so it ends as a whole", exc_info=task.exception())
            server.should_exit = True

    limits = SeriesLimits()

    async def page(query: Query) -> Iterable[Sample]:
        samples = limits.apply([*models.samples(), *tenancy.samples(), *await batches.samples()])
        return with_other_names(samples, query)

    metrics = MetricsPage(page)
    responses = SharedResponses(files.with_name("responses"))
    app = create_app(models, tenancy, run, tracing, responses)
    batches = BatchService(app, models, tenancy, files)
    config = uvicorn.Config(
        app,
        http=BoundedHttpTools,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_DRAIN_S,
        backlog=_BACKLOG,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listening])


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket on which `serve` listens. Other gateway processes can share its port."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind((host, port))
    return listening


def main(run_dir: str, number: str) -> None:
    folder = Path(run_dir)
    cluster = load(folder)
    assert cluster is not None, run_dir
    log_to()
    with hold_lock(folder / f"gateway-{number}.lock"):
        address = urlsplit(cluster.serve_url)
        listening = bound_socket(address.hostname or cluster.head_ip, address.port or 8000)
        settings = load_cluster(cluster.config_path).settings
        tenancy = Tenancy.of_cluster(cluster, number)

        def announce_page(address: str) -> None:
            announce(folder, f"gateway-{number}", Target("raytide-gateway", address))

        serve(
            cluster.gcs_address,
            listening,
            f"{os.getpid()}",
            tenancy,
            folder / "files",
            settings.gateway.hosted,
            announce_page,
            RequestTracing.of(settings.tracing),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
