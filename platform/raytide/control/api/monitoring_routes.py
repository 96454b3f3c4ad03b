"""The API's routes for metrics history, latencies measured by clients, alerts and their actions, and orders to the
controller.
"""

from typing import Annotated, Any

from anyio import CapacityLimiter
from fastapi import APIRouter, Query, Request

from raytide.control.api import queries as q
from raytide.control.api.services.metrics.page import ClientLatencies
from raytide.control.views import to_json
from raytide.core.errors import UsageError
from raytide.dashboards.alerts.service import MonitoringService

_MOST = 1000
_MOST_FILTERS = 16
_LONGEST_S = 400 * 86_400.0
_OPTIONS = frozenset({"metric", "since_s", "step_s", "rate", "quantile", "by"})
"""The options of a query of the history; all its other parameters are labels."""

Metric = Annotated[str, Query(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$", max_length=200)]
Span = Annotated[float, Query(gt=0, le=_LONGEST_S, allow_inf_nan=False)]
Quantile = Annotated[float | None, Query(ge=0, le=1, allow_inf_nan=False)]
By = Annotated[str | None, Query(pattern=r"^[a-zA-Z0-9_,]*$", max_length=500)]


def monitoring_routes(service: MonitoringService, latencies: ClientLatencies) -> APIRouter:
    router = APIRouter(prefix="/v1")
    curves, writes = CapacityLimiter(2), CapacityLimiter(4)

    @router.get("/history")
    async def history(
        request: Request,
        caller: q.CallerInput,
        metric: Metric,
        since_s: Span = 3600.0,
        step_s: Span = 60.0,
        rate: bool = False,
        quantile: Quantile = None,
        by: By = None,
    ) -> Any:
        where = {name: value for name, value in request.query_params.items() if name not in _OPTIONS}
        if len(where) > _MOST_FILTERS:
            raise UsageError(f"a query has at most {_MOST_FILTERS} labels.", hint="Leave some out.")
        labels = None if by is None else [name for name in by.split(",") if name]
        found = await q.in_pool(
            curves, service.history, metric, where, since_s, step_s, is_rate=rate, quantile=quantile, by=labels
        )
        return {"series": [{"labels": dict(curve.labels), "points": curve.points} for curve in found]}

    @router.get("/history/metrics")
    async def metrics(caller: q.CallerInput) -> Any:
        return await q.in_pool(curves, service.metrics)

    @router.get("/alerts")
    async def alerts(caller: q.CallerInput) -> Any:
        return await q.in_pool(writes, service.alerts, caller)

    @router.get("/alerts/history")
    async def episodes(caller: q.CallerInput, limit: q.Limit = 100, name: q.Word = None) -> Any:
        return [to_json(each) for each in await q.in_pool(writes, service.episodes, caller, min(limit, _MOST), name)]

    @router.get("/alerts/actions")
    async def actions(caller: q.CallerInput, limit: q.Limit = 100) -> Any:
        return [to_json(each) for each in await q.in_pool(writes, service.actions, caller, min(limit, _MOST))]

    @router.post("/alerts/actions")
    async def note_action(caller: q.CallerInput, body: q.Body) -> Any:
        await q.in_pool(writes, service.note_action, body, caller)
        return {}

    @router.post("/alerts/webhook")
    async def webhook(caller: q.CallerInput, body: q.Body) -> Any:
        return {"alerts": await q.in_pool(writes, service.receive, body, caller)}

    @router.get("/alerts/silences")
    async def silences(caller: q.CallerInput) -> Any:
        return [to_json(each) for each in await q.in_pool(writes, service.silences)]

    @router.post("/alerts/silences")
    async def silence(caller: q.CallerInput, body: q.Body) -> Any:
        return to_json(await q.in_pool(writes, service.silence, body, caller))

    @router.post("/alerts/test")
    async def test(caller: q.CallerInput, body: q.Body) -> Any:
        return await q.in_pool(writes, service.test, body, caller)

    @router.get("/probes")
    async def probes(caller: q.CallerInput) -> Any:
        return await q.in_pool(writes, service.probes)

    @router.get("/anomalies")
    async def anomalies(caller: q.CallerInput) -> Any:
        return await q.in_pool(writes, service.anomalies)

    @router.post("/endpoints/{name}/latency")
    async def latency(caller: q.CallerInput, name: q.Name, body: q.Body) -> Any:
        await q.in_pool(writes, latencies.report, name, body, caller)
        return {}

    @router.post("/orders")
    async def order(caller: q.CallerInput, body: q.Body) -> Any:
        return to_json(await q.in_pool(writes, service.order, body, caller))

    @router.get("/orders/{order_id}")
    async def find_order(caller: q.CallerInput, order_id: q.Name) -> Any:
        return to_json(await q.in_pool(writes, service.find_order, order_id, caller))

    return router
