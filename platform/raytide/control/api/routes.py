"""The API's routes. Each passes the caller and the input to a service and returns the service's result as JSON."""

import asyncio
import time
from collections import defaultdict
from typing import Any

from anyio import CapacityLimiter
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from raytide.control.api import queries as q
from raytide.control.api.auth import Tokens
from raytide.control.api.gate import Gate
from raytide.control.api.model_routes import model_routes
from raytide.control.api.monitoring_routes import monitoring_routes
from raytide.control.api.page_routes import page_routes
from raytide.control.api.services.service import ApiService
from raytide.control.api.tenancy_routes import tenancy_routes
from raytide.control.views import to_json
from raytide.core.errors import NotFoundError, RaytideError, UsageError
from raytide.core.objects.job import BudgetPer
from raytide.core.telemetry.metrics import CONTENT_TYPE
from raytide.core.telemetry.targets import discovery
from raytide.ledger.report import By

_LONGEST_POLL_S = 120.0
_UPLOADS = 3
"""The number of packages that one team may upload at once; the next upload waits."""
_METRICS_S = 1.0
"""The age up to which a reading of the metrics is reused, so that requests cause at most one reading a second."""


class Pools:
    """Thread pools for requests that wait for something other than the store. Such requests therefore never delay other
    routes.
    """

    def __init__(self) -> None:
        self.health, self.metrics = CapacityLimiter(1), CapacityLimiter(1)
        self.submissions, self.slow, self.uploads = CapacityLimiter(8), CapacityLimiter(8), CapacityLimiter(4)
        self.curves = CapacityLimiter(2)
        """Reading a run's log may take minutes, since users write into its folder."""


def create_app(service: ApiService, tokens: Tokens) -> FastAPI:
    app = FastAPI(title="raytide", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, tokens=tokens, now_s=service.now_s, on_change=service.on_change)
    pools = Pools()
    uploads: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_UPLOADS))
    measured: dict[str, Any] = {"at_s": -_METRICS_S, "text": b""}

    @app.exception_handler(RaytideError)
    async def known(_: Request, error: RaytideError) -> JSONResponse:
        return JSONResponse({"error": error.to_json()}, status_code=error.http_status)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=UsageError.http_status)  # the client is gone

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        problem = UsageError(f"malformed request: {where}: {first['msg']}.", hint="Correct it and try again.")
        return JSONResponse({"error": problem.to_json()}, status_code=problem.http_status)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        kind = NotFoundError if error.status_code == NotFoundError.http_status else UsageError
        problem = kind(f"{error.detail}.", hint="Use raytide's client.")
        return JSONResponse({"error": problem.to_json()}, status_code=error.status_code, headers=error.headers)

    async def lease(request: Request) -> Response:
        job_id, poll, caller = (
            q.checked_name(request.path_params["job_id"]),
            q.Poll.from_request(request),
            request.state.caller,
        )
        timeout_s = min(poll.timeout_s, _LONGEST_POLL_S)
        found = await service.jobs.leases.wait(job_id, caller.acting_on, poll.newer_than, timeout_s, request.receive)
        return Response(found or b"{}", media_type="application/json")

    app.add_route("/v1/jobs/{job_id}/lease", lease, methods=["GET"])

    @app.get("/health")
    async def health() -> Any:
        return await q.in_pool(pools.health, service.health)

    def measure() -> bytes:
        if time.monotonic() - measured["at_s"] >= _METRICS_S:
            measured["text"] = service.metrics()
            measured["at_s"] = time.monotonic()
        text: bytes = measured["text"]
        return text

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await q.in_pool(pools.metrics, measure), media_type=CONTENT_TYPE)

    @app.get("/v1/targets")
    async def targets() -> Any:
        return discovery(await q.in_pool(pools.metrics, service.targets))

    @app.get("/v1/status")
    def status(caller: q.CallerInput) -> Any:
        return to_json(service.status(caller))

    @app.post("/v1/jobs")
    async def submit(caller: q.CallerInput, body: q.Body, key: q.Key = None) -> Any:
        return to_json(await q.in_pool(pools.submissions, service.jobs.submit, body, caller, key))

    @app.put("/v1/packages/{digest}")
    async def upload(caller: q.CallerInput, digest: q.Digest, request: Request) -> Any:
        length = request.headers.get("content-length", "")
        async with uploads[caller.home]:
            await q.in_pool(pools.uploads, service.jobs.make_room, caller, int(length) if length else None)
            with service.packages.receive(digest, caller.home) as part:
                async for chunk in request.stream():
                    await q.in_pool(pools.uploads, part.write, chunk)
                await q.in_pool(pools.uploads, part.finish)
        return {}

    @app.get("/v1/packages/{digest}")
    def package(caller: q.CallerInput, digest: q.Digest) -> Response:
        return FileResponse(service.jobs.package(digest, caller))

    @app.get("/v1/jobs")
    def jobs(caller: q.CallerInput, limit: q.Limit = 100, offset: q.Offset = 0, active: bool = False) -> Any:
        return [to_json(view) for view in service.jobs.page(caller, min(limit, 1000), offset, active=active)]

    @app.get("/v1/jobs/{job_id}")
    def job(caller: q.CallerInput, job_id: q.Name) -> Any:
        return to_json(service.jobs.job(job_id, caller))

    @app.post("/v1/jobs/{job_id}/stop")
    def stop(caller: q.CallerInput, job_id: q.Name) -> Any:
        return to_json(service.jobs.stop(job_id, caller))

    @app.post("/v1/jobs/{job_id}/retry")
    async def retry(caller: q.CallerInput, job_id: q.Name, key: q.Key = None) -> Any:
        return to_json(await q.in_pool(pools.submissions, service.jobs.retry, job_id, caller, key))

    @app.get("/v1/jobs/{job_id}/why")
    def why(caller: q.CallerInput, job_id: q.Name) -> Any:
        return to_json(service.jobs.why(job_id, caller))

    @app.put("/v1/jobs/{job_id}/budget")
    def job_budget(
        caller: q.CallerInput, job_id: q.Name, usd: q.Usd = None, soft: bool = False, per: BudgetPer = "job"
    ) -> Any:
        return to_json(service.jobs.set_budget(job_id, caller.require_person(), usd, soft=soft, per=per))

    @app.get("/v1/jobs/{job_id}/logs")
    async def logs(caller: q.CallerInput, job_id: q.Name, after: q.Place = "", tail: q.Tail = None) -> Any:
        return to_json(await q.in_pool(pools.slow, service.jobs.logs, job_id, caller, after, tail))

    @app.get("/v1/jobs/{job_id}/metrics")
    async def curves(caller: q.CallerInput, job_id: q.Name, points: q.Points = 500) -> Any:
        return to_json(await q.in_pool(pools.curves, service.jobs.curves, job_id, caller, points))

    @app.post("/v1/jobs/{job_id}/report")
    def report(caller: q.CallerInput, job_id: q.Name, body: q.Body) -> Any:
        service.jobs.report(job_id, caller, body)
        return {}

    @app.post("/v1/jobs/{job_id}/release")
    def release(caller: q.CallerInput, job_id: q.Name, body: q.Body) -> Any:
        service.jobs.release(job_id, caller, str(body.get("error", "")))
        return {}

    @app.post("/v1/endpoints")
    async def serve(caller: q.CallerInput, body: q.Body) -> Any:
        return to_json(await q.in_pool(pools.submissions, service.endpoints.serve, body, caller))

    @app.get("/v1/endpoints")
    def endpoints(caller: q.CallerInput) -> Any:
        return [to_json(status) for status in service.endpoints.all(caller)]

    @app.get("/v1/endpoints/{name}")
    def endpoint(caller: q.CallerInput, name: q.Name) -> Any:
        return to_json(service.endpoints.get(name, caller))

    @app.delete("/v1/endpoints/{name}")
    def delete_endpoint(caller: q.CallerInput, name: q.Name) -> Any:
        return to_json(service.endpoints.delete(name, caller))

    @app.get("/v1/plans")
    def plans(caller: q.CallerInput, limit: q.Limit = 50, until_s: q.Until = None) -> Any:
        return service.plans(caller, min(limit, 1000), until_s)

    @app.get("/v1/corrections")
    def corrections(caller: q.CallerInput) -> Any:
        return to_json(service.jobs.learned.current())

    @app.get("/v1/snapshot")
    async def snapshot(caller: q.CallerInput) -> Response:
        return Response(await q.in_pool(pools.slow, service.snapshot, caller), media_type="application/json")

    @app.get("/v1/cost")
    def cost(caller: q.CallerInput) -> Any:
        return to_json(service.cost(caller))

    @app.get("/v1/cost/{by}")
    def costs(caller: q.CallerInput, by: By, since_s: q.Since = 0.0) -> Any:
        return to_json(service.costs(by, caller, since_s))

    @app.get("/v1/teams")
    def teams(caller: q.CallerInput) -> Any:
        return [to_json(team) for team in service.teams(caller)]

    @app.patch("/v1/teams/{name}")
    def change_team(caller: q.CallerInput, name: q.Name, body: q.Body) -> Any:
        return to_json(service.accounts.change(name, body, caller))

    app.include_router(tenancy_routes(service.tenancy))
    app.include_router(monitoring_routes(service.monitoring, service.client_latencies))
    app.include_router(model_routes(service.models, service.datasets, service.endpoints))
    app.include_router(page_routes(service, tokens))
    return app
