"""The routes: each takes the caller and its input to the Desk and its answer to JSON."""

import asyncio
import time
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response

from raytide.control.api.auth import Caller, Tokens
from raytide.control.api.desk import Desk
from raytide.control.wire import to_json
from raytide.core.errors import RaytideError, UsageError
from raytide.core.job import BudgetPer
from raytide.ledger.report import By

_LONG_POLL_S = 0.1
_LONGEST_POLL_S = 60.0

Body = dict[str, Any]


def create_app(desk: Desk, tokens: Tokens) -> FastAPI:
    app = FastAPI(title="raytide", docs_url=None, redoc_url=None)

    def caller(authorization: Annotated[str | None, Header()] = None) -> Caller:
        return tokens.caller(authorization)

    Who = Annotated[Caller, Depends(caller)]

    @app.exception_handler(RaytideError)
    def known(_: Request, error: RaytideError) -> JSONResponse:
        return JSONResponse({"error": error.to_json()}, status_code=error.http_status)

    @app.exception_handler(RequestValidationError)
    def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        problem = UsageError(f"malformed request: {error.errors()[0]['msg']}.")
        return JSONResponse({"error": problem.to_json()}, status_code=problem.http_status)

    @app.get("/health")
    def health() -> Any:
        return {"ok": True, "controller_at_s": desk.live().at_s}

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(desk.metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/status")
    def status(who: Who) -> Any:
        return to_json(desk.status(who))

    @app.post("/v1/jobs")
    def submit(who: Who, body: Body, key: str | None = None) -> Any:
        return to_json(desk.submit(body, who, key))

    @app.put("/v1/packages/{digest}")
    async def upload(who: Who, digest: str, request: Request) -> Any:
        await asyncio.to_thread(desk.make_room)
        with desk.packages.receive(digest) as part:
            async for chunk in request.stream():
                await asyncio.to_thread(part.write, chunk)
        return {}

    @app.get("/v1/packages/{digest}")
    def package(who: Who, digest: str) -> Response:
        return FileResponse(desk.package(digest, who))

    @app.get("/v1/jobs")
    def jobs(who: Who, limit: int = 100, offset: int = 0, active: bool = False) -> Any:
        return [to_json(view) for view in desk.jobs(who, min(max(limit, 1), 1000), max(offset, 0), active=active)]

    @app.get("/v1/jobs/{job_id}")
    def job(who: Who, job_id: str) -> Any:
        return to_json(desk.job(job_id, who))

    @app.post("/v1/jobs/{job_id}/stop")
    def stop(who: Who, job_id: str) -> Any:
        return to_json(desk.stop(job_id, who))

    @app.post("/v1/jobs/{job_id}/retry")
    def retry(who: Who, job_id: str, key: str | None = None) -> Any:
        return to_json(desk.retry(job_id, who, key))

    @app.get("/v1/jobs/{job_id}/why")
    def why(who: Who, job_id: str) -> Any:
        return to_json(desk.why(job_id, who))

    @app.put("/v1/jobs/{job_id}/budget")
    def job_budget(who: Who, job_id: str, usd: float | None = None, soft: bool = False, per: BudgetPer = "job") -> Any:
        return to_json(desk.set_budget(job_id, who, usd, soft=soft, per=per))

    @app.get("/v1/jobs/{job_id}/logs")
    def logs(who: Who, job_id: str, after: str = "", tail: Annotated[int | None, Query(ge=0)] = None) -> Any:
        return to_json(desk.logs(job_id, who, after, tail))

    @app.post("/v1/jobs/{job_id}/report")
    def report(who: Who, job_id: str, body: Body) -> Any:
        desk.report(job_id, who, body)
        return {}

    @app.post("/v1/jobs/{job_id}/release")
    def release(who: Who, job_id: str, body: Body) -> Any:
        desk.release(job_id, who, str(body.get("error", "")))
        return {}

    @app.get("/v1/jobs/{job_id}/lease")
    async def lease(who: Who, request: Request, job_id: str, newer_than: int = -1, timeout_s: float = 0.0) -> Any:
        deadline = time.monotonic() + min(timeout_s, _LONGEST_POLL_S)
        while True:
            now = await asyncio.to_thread(desk.lease, job_id, who)
            if now.epoch > newer_than or time.monotonic() >= deadline:
                return to_json(now)
            if await request.is_disconnected():
                await asyncio.to_thread(desk.hung_up, job_id)
                return {}
            await asyncio.sleep(_LONG_POLL_S)

    @app.post("/v1/endpoints")
    def serve(who: Who, body: Body) -> Any:
        return to_json(desk.serve(body, who))

    @app.get("/v1/endpoints")
    def endpoints(who: Who) -> Any:
        return [to_json(status) for status in desk.endpoints(who)]

    @app.get("/v1/endpoints/{name}")
    def endpoint(who: Who, name: str) -> Any:
        return to_json(desk.endpoint(name, who))

    @app.delete("/v1/endpoints/{name}")
    def delete_endpoint(who: Who, name: str) -> Any:
        return to_json(desk.delete_endpoint(name, who))

    @app.get("/v1/plans")
    def plans(who: Who, limit: int = 50, until_s: float | None = None) -> Any:
        return desk.plans(who, min(max(limit, 1), 1000), until_s)

    @app.get("/v1/snapshot")
    def snapshot(who: Who) -> Response:
        return Response(desk.snapshot(who), media_type="application/json")

    @app.get("/v1/cost")
    def cost(who: Who) -> Any:
        return to_json(desk.cost(who))

    @app.get("/v1/cost/{by}")
    def costs(who: Who, by: By, since_s: float = 0.0) -> Any:
        return to_json(desk.costs(by, who, since_s))

    @app.get("/v1/teams")
    def teams(who: Who) -> Any:
        return [to_json(team) for team in desk.teams(who)]

    @app.patch("/v1/teams/{name}")
    def change_team(who: Who, name: str, body: Body) -> Any:
        return to_json(desk.accounts.change(name, body, who))

    return app
