"""The routes: each passes the caller and the input to the service, and its result to JSON."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from raytide.control.api import queries as q
from raytide.control.api.auth import Caller, Tokens
from raytide.control.api.gate import Gate
from raytide.control.api.services.service import ApiService
from raytide.control.views import to_json
from raytide.core.errors import NotFoundError, RaytideError, UsageError
from raytide.core.objects.job import BudgetPer
from raytide.ledger.report import By

_LONGEST_POLL_S = 120.0
_UPLOADS = 3
"""The packages of one team that may be uploaded at once; the next upload waits."""
_METRICS_S = 1.0
"""The age up to which a reading of the metrics is reused, so that requests cause at most one reading a second."""

T = TypeVar("T")


class Pools:
    """Thread limits for requests that wait for something other than the store, separate from all other routes."""

    def __init__(self) -> None:
        self.health, self.metrics = CapacityLimiter(1), CapacityLimiter(1)
        self.submissions, self.slow, self.uploads = CapacityLimiter(8), CapacityLimiter(8), CapacityLimiter(4)


async def _in(pool: CapacityLimiter, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return await to_thread.run_sync(partial(work, *args, **kwargs), limiter=pool)


def create_app(service: ApiService, tokens: Tokens) -> FastAPI:
    app = FastAPI(title="raytide", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, tokens=tokens)
    pools = Pools()
    uploads: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_UPLOADS))
    measured: dict[str, Any] = {"at_s": -_METRICS_S, "text": b""}

    async def caller(request: Request) -> Caller:
        found: Caller = request.state.caller
        return found

    Who = Annotated[Caller, Depends(caller)]

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
        job_id, poll, who = (
            q.checked_name(request.path_params["job_id"]),
            q.Poll.from_request(request),
            request.state.caller,
        )
        timeout_s = min(poll.timeout_s, _LONGEST_POLL_S)
        found = await service.jobs.leases.wait(job_id, who.acting_on, poll.newer_than, timeout_s, request.receive)
        return Response(found or b"{}", media_type="application/json")

    app.add_route("/v1/jobs/{job_id}/lease", lease, methods=["GET"])

    @app.get("/health")
    async def health() -> Any:
        return await _in(pools.health, service.health)

    def measure() -> bytes:
        if time.monotonic() - measured["at_s"] >= _METRICS_S:
            measured["text"] = service.metrics()
            measured["at_s"] = time.monotonic()
        text: bytes = measured["text"]
        return text

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await _in(pools.metrics, measure), media_type="text/plain; version=0.0.4")

    @app.get("/v1/status")
    def status(who: Who) -> Any:
        return to_json(service.status(who))

    @app.post("/v1/jobs")
    async def submit(who: Who, body: q.Body, key: q.Key = None) -> Any:
        return to_json(await _in(pools.submissions, service.jobs.submit, body, who, key))

    @app.put("/v1/packages/{digest}")
    async def upload(who: Who, digest: q.Digest, request: Request) -> Any:
        length = request.headers.get("content-length", "")
        async with uploads[who.home]:
            await _in(pools.uploads, service.jobs.make_room, who, int(length) if length else None)
            with service.packages.receive(digest, who.home) as part:
                async for chunk in request.stream():
                    await _in(pools.uploads, part.write, chunk)
        return {}

    @app.get("/v1/packages/{digest}")
    def package(who: Who, digest: q.Digest) -> Response:
        return FileResponse(service.jobs.package(digest, who))

    @app.get("/v1/jobs")
    def jobs(who: Who, limit: q.Limit = 100, offset: q.Offset = 0, active: bool = False) -> Any:
        return [to_json(view) for view in service.jobs.page(who, min(limit, 1000), offset, active=active)]

    @app.get("/v1/jobs/{job_id}")
    def job(who: Who, job_id: q.Name) -> Any:
        return to_json(service.jobs.job(job_id, who))

    @app.post("/v1/jobs/{job_id}/stop")
    def stop(who: Who, job_id: q.Name) -> Any:
        return to_json(service.jobs.stop(job_id, who))

    @app.post("/v1/jobs/{job_id}/retry")
    async def retry(who: Who, job_id: q.Name, key: q.Key = None) -> Any:
        return to_json(await _in(pools.submissions, service.jobs.retry, job_id, who, key))

    @app.get("/v1/jobs/{job_id}/why")
    def why(who: Who, job_id: q.Name) -> Any:
        return to_json(service.jobs.why(job_id, who))

    @app.put("/v1/jobs/{job_id}/budget")
    def job_budget(who: Who, job_id: q.Name, usd: q.Usd = None, soft: bool = False, per: BudgetPer = "job") -> Any:
        return to_json(service.jobs.set_budget(job_id, who.require_person(), usd, soft=soft, per=per))

    @app.get("/v1/jobs/{job_id}/logs")
    async def logs(who: Who, job_id: q.Name, after: q.Place = "", tail: q.Tail = None) -> Any:
        return to_json(await _in(pools.slow, service.jobs.logs, job_id, who, after, tail))

    @app.post("/v1/jobs/{job_id}/report")
    def report(who: Who, job_id: q.Name, body: q.Body) -> Any:
        service.jobs.report(job_id, who, body)
        return {}

    @app.post("/v1/jobs/{job_id}/release")
    def release(who: Who, job_id: q.Name, body: q.Body) -> Any:
        service.jobs.release(job_id, who, str(body.get("error", "")))
        return {}

    @app.post("/v1/endpoints")
    async def serve(who: Who, body: q.Body) -> Any:
        return to_json(await _in(pools.submissions, service.endpoints.serve, body, who))

    @app.get("/v1/endpoints")
    def endpoints(who: Who) -> Any:
        return [to_json(status) for status in service.endpoints.all(who)]

    @app.get("/v1/endpoints/{name}")
    def endpoint(who: Who, name: q.Name) -> Any:
        return to_json(service.endpoints.get(name, who))

    @app.delete("/v1/endpoints/{name}")
    def delete_endpoint(who: Who, name: q.Name) -> Any:
        return to_json(service.endpoints.delete(name, who))

    @app.get("/v1/plans")
    def plans(who: Who, limit: q.Limit = 50, until_s: q.Until = None) -> Any:
        return service.plans(who, min(limit, 1000), until_s)

    @app.get("/v1/snapshot")
    async def snapshot(who: Who) -> Response:
        return Response(await _in(pools.slow, service.snapshot, who), media_type="application/json")

    @app.get("/v1/cost")
    def cost(who: Who) -> Any:
        return to_json(service.cost(who))

    @app.get("/v1/cost/{by}")
    def costs(who: Who, by: By, since_s: q.Since = 0.0) -> Any:
        return to_json(service.costs(by, who, since_s))

    @app.get("/v1/teams")
    def teams(who: Who) -> Any:
        return [to_json(team) for team in service.teams(who)]

    @app.patch("/v1/teams/{name}")
    def change_team(who: Who, name: q.Name, body: q.Body) -> Any:
        return to_json(service.accounts.change(name, body, who))

    return app
