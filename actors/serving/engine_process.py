"""A replica's engine in a process of its own: `python -m raytide.actors.serving.engine_process REPORT_FD`.

Apart from the engine's thread, the process runs only the server for connections to the engine, and a metrics page.
Clients' HTTP requests are handled in other processes. The owner sends the endpoint's spec, the model's directory and
the secret for connections as a line of JSON on stdin, so that no argument list contains the secret. The process
writes lines of JSON to REPORT_FD: the phases of its start, the invitation for members on other nodes, and its port
or an error. The process ends when stdin is closed, when its parent ends, and when its engine is broken.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any, BinaryIO

from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.engine.base import Engine
from raytide.actors.engine.model.parallel.launcher import Invitation, LocalMembers
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import GenRequest
from raytide.actors.serving.engines import build_engine, choose_engine, num_processes
from raytide.actors.serving.health import ProgressWatch
from raytide.actors.serving.metrics import engine_samples
from raytide.core.errors import RaytideError
from raytide.core.io.process import die_with_parent
from raytide.core.logs import log_to
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.specs.rollout import endpoint_of, revision_of
from raytide.core.telemetry.metrics import Sample
from raytide.core.telemetry.other_names import with_other_names
from raytide.core.telemetry.page import MetricsPage, Query

_log = logging.getLogger(__name__)

_PROBLEM_PERIOD_S = 0.5
_LAST_WORDS_S = 1.0
"""The seconds from the detection of a broken engine to the end of its process. Open requests get their errors
meanwhile.
"""


async def run(order: dict[str, Any], report: BinaryIO) -> None:
    """Starts an engine and serves it until stdin ends or the engine is broken.

    `order` has the endpoint's spec, the model's directory, the host, the secret and the replica's name. The phases of
    the start and the resulting port or error are written to `report`.
    """
    spec = ServeSpec.parse(order["spec"], where="endpoint")
    try:
        _write(report, {"phase": "load"})
        engine = build_engine(spec, order["model_dir"], _launcher(spec, order["host"], report))
        info = await engine.start()
        if info.backend != "fake":
            _write(report, {"phase": "warm-up"})
            await _warm_up(engine, classifies=info.num_labels > 0)
    except RaytideError as error:
        _write(report, {"error": error.to_json()})
        return
    health = _Health(engine)
    slo_ttft_s = spec.replicas.slo_ttft_s
    server = EngineServer(engine, info, order["secret"], problem=health.problem, slo_ttft_s=slo_ttft_s)
    port = await server.listen(order["host"])
    page = MetricsPage(partial(_page, engine, spec.name, order["replica"]))
    address = await page.start(order["host"])
    # A full collection would go through all that was loaded, and stop the engine for 0.2 s.
    gc.collect()
    gc.freeze()
    _write(report, {"port": port, "metrics": address})
    parent = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not parent.done():
        if (problem := await health.problem()) is not None:
            _log.critical("the engine of endpoint %s ends itself: %s", spec.name, problem)
            await asyncio.sleep(_LAST_WORDS_S)
            os._exit(1)
        await asyncio.wait({parent}, timeout=_PROBLEM_PERIOD_S)
    await server.close()
    await engine.shutdown()


def _launcher(spec: ServeSpec, host: str, report: BinaryIO) -> LocalMembers | None:
    """Returns the object that starts this node's members and asks the replica for those of other nodes; None if one
    member computes alone.
    """
    kind = choose_engine(spec).kind
    if spec.members == 1 or kind == "fake":
        return None

    def invite(invitation: Invitation) -> None:
        _write(report, {"members": asdict(invitation)})

    if kind == "vllm":  # it starts this node's processes itself
        return LocalMembers((), local_size=1, host=host, invite=invite)
    local_size = num_processes(spec) // spec.members
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    return LocalMembers(
        range(1, local_size), local_size=local_size, host=host, threads=max(1, threads // local_size), invite=invite
    )


async def _page(engine: Engine, application: str, replica: str, query: Query) -> Iterable[Sample]:
    """Returns the engine's metrics; with `?names=vllm` in the query, under the names of vLLM's own server too."""
    samples = engine_samples(await engine.stats(), endpoint_of(application), revision_of(application), replica)
    return with_other_names(samples, query)


class _Health:
    """Detects a broken engine. Such an engine would fail requests at once, look idle, and so attract more requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watch = ProgressWatch()

    async def problem(self) -> str | None:
        try:
            stats = await self._engine.stats()
        except Exception as error:
            return f"the engine does not answer: {error}"
        return self._watch.problem(stats, time.monotonic())


async def _warm_up(engine: Engine, *, classifies: bool) -> None:
    """Generates one token, so that the engine compiles its kernels now. Otherwise the first client would wait for that.
    A model that classifies generates nothing, and classifies one token instead.
    """
    if classifies:
        await engine.classify([[0]])
        return
    request = GenRequest(request_id="warm-up", prompt=[0], sampling=SamplingParams(max_tokens=1))
    async for _ in engine.generate(request):
        pass


def _write(report: BinaryIO, line: dict[str, Any]) -> None:
    report.write(json.dumps(line).encode() + b"\n")
    report.flush()


def main(report_fd: str) -> None:
    die_with_parent(signal.SIGKILL)  # a killed replica leaves no engine behind
    log_to()
    order = json.loads(sys.stdin.readline())
    asyncio.run(run(order, os.fdopen(int(report_fd), "wb")))
    os._exit(0)  # a thread that hangs in a library would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
