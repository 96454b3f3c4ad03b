"""The API's routes for registered models and datasets, and for the revisions of endpoints."""

from typing import Any, Literal

from anyio import CapacityLimiter
from fastapi import APIRouter

from raytide.control.api import queries as q
from raytide.control.api.services.endpoints import EndpointService
from raytide.control.api.services.registry import DatasetService, ModelService
from raytide.control.views import to_json

_MOST = 1000


def model_routes(models: ModelService, datasets: DatasetService, endpoints: EndpointService) -> APIRouter:
    router = APIRouter(prefix="/v1")
    submissions, log_reads, reports = CapacityLimiter(4), CapacityLimiter(4), CapacityLimiter(4)

    @router.post("/models")
    async def register(caller: q.CallerInput, body: q.Body) -> Any:
        return to_json(await q.in_pool(submissions, models.register, body, caller))

    @router.get("/models")
    def registered(caller: q.CallerInput, limit: q.Limit = 100, offset: q.Offset = 0) -> Any:
        return [to_json(model) for model in models.all(caller, min(limit, _MOST), offset)]

    @router.get("/models/{name}")
    def model(caller: q.CallerInput, name: q.Name) -> Any:
        return to_json(models.get(name, caller))

    @router.get("/models/{name}/versions")
    def versions(caller: q.CallerInput, name: q.Name, limit: q.Limit = 100, offset: q.Offset = 0) -> Any:
        return [to_json(version) for version in models.versions(name, caller, min(limit, _MOST), offset)]

    @router.get("/models/{name}/versions/{which}")
    def version(caller: q.CallerInput, name: q.Name, which: q.Name) -> Any:
        return to_json(models.version(name, which, caller))

    @router.put("/models/{name}/aliases/{alias}")
    def promote(caller: q.CallerInput, name: q.Name, alias: q.Name, body: q.Body) -> Any:
        return to_json(models.promote(name, alias, body, caller))

    @router.get("/models/{name}/history")
    def history(
        caller: q.CallerInput, name: q.Name, alias: q.Word = None, until_s: q.Until = None, limit: q.Limit = 100
    ) -> Any:
        return [to_json(change) for change in models.history(name, caller, alias, until_s, min(limit, _MOST))]

    @router.post("/datasets")
    async def register_dataset(caller: q.CallerInput, body: q.Body) -> Any:
        return to_json(await q.in_pool(submissions, datasets.register, body, caller))

    @router.get("/datasets")
    def registered_datasets(caller: q.CallerInput, limit: q.Limit = 100, offset: q.Offset = 0) -> Any:
        return [to_json(dataset) for dataset in datasets.all(caller, min(limit, _MOST), offset)]

    @router.get("/datasets/{name}/versions")
    def dataset_versions(caller: q.CallerInput, name: q.Name, limit: q.Limit = 100, offset: q.Offset = 0) -> Any:
        return [to_json(version) for version in datasets.versions(name, caller, min(limit, _MOST), offset)]

    @router.get("/datasets/{name}/versions/{number}")
    def dataset_version(caller: q.CallerInput, name: q.Name, number: q.VersionNumber) -> Any:
        return to_json(datasets.version(name, number, caller))

    @router.get("/datasets/{name}")
    def newest_dataset(caller: q.CallerInput, name: q.Name) -> Any:
        return to_json(datasets.version(name, None, caller))

    @router.get("/datasets/{name}/versions/{number}/uses")
    def dataset_uses(caller: q.CallerInput, name: q.Name, number: q.VersionNumber) -> Any:
        return to_json(datasets.uses(name, number, caller))

    @router.get("/endpoints/{name}/revisions")
    def revisions(caller: q.CallerInput, name: q.Name) -> Any:
        return [to_json(revision) for revision in endpoints.revisions(name, caller)]

    @router.post("/endpoints/{name}/rollback")
    async def roll_back(caller: q.CallerInput, name: q.Name, revision: q.Revision) -> Any:
        return to_json(await q.in_pool(submissions, endpoints.roll_back, name, revision, caller))

    @router.post("/rollouts")
    async def start_rollout(caller: q.CallerInput, body: q.Body) -> Any:
        return to_json(await q.in_pool(submissions, endpoints.start_rollout, body, caller))

    @router.get("/endpoints/{name}/rollouts")
    def rollouts(caller: q.CallerInput, name: q.Name, limit: q.Limit = 100) -> Any:
        return [to_json(rollout) for rollout in endpoints.rollouts(name, caller, min(limit, _MOST))]

    @router.post("/endpoints/{name}/rollout/{end}")
    async def end_rollout(
        caller: q.CallerInput, name: q.Name, end: Literal["stop", "promote"], why: q.Word = None
    ) -> Any:
        return to_json(await q.in_pool(submissions, endpoints.end_rollout, name, end, why or "", caller))

    @router.get("/endpoints/{name}/feedback")
    def feedback(caller: q.CallerInput, name: q.Name) -> Any:
        return [to_json(each) for each in endpoints.feedback(name, caller)]

    @router.post("/gateway/feedback")
    async def save_feedback(body: q.Body) -> Any:
        return {"revision": await q.in_pool(reports, endpoints.save_feedback, body)}

    @router.post("/gateway/rollouts")
    async def count_rollouts(body: q.Body) -> Any:
        await q.in_pool(reports, endpoints.count_rollouts, body)
        return {}

    @router.get("/endpoints/{name}/logs")
    async def logs(caller: q.CallerInput, name: q.Name, after: q.LogPlaces = "", tail: q.Tail = None) -> Any:
        return to_json(await q.in_pool(log_reads, endpoints.logs, name, after, tail, caller))

    @router.post("/endpoints/{name}/signals")
    def report(caller: q.CallerInput, name: q.Name, body: q.Body) -> Any:
        endpoints.report(name, body, caller)
        return {}

    @router.post("/endpoints/{name}/adapters")
    async def adapters(caller: q.CallerInput, name: q.Name, body: q.Body) -> Any:
        return to_json(await q.in_pool(submissions, endpoints.change_adapters, name, body, caller))

    @router.post("/endpoints/{name}/weights")
    async def weights(caller: q.CallerInput, name: q.Name, body: q.Body) -> Any:
        return to_json(await q.in_pool(submissions, endpoints.change_weights, name, body, caller))

    return router
