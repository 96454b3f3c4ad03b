"""The HTTP routes for API keys, usage and the audit log, and the routes that only gateways may call."""

import asyncio
import json
import math
from typing import Annotated, Any

from anyio import CapacityLimiter
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from starlette.background import BackgroundTask

from raytide.control.api import queries as q
from raytide.control.api.services.tenancy import TenancyService
from raytide.control.views import to_json
from raytide.core.errors import DeniedError
from raytide.core.objects.api_key import UsageBy
from raytide.core.state.tenancy.usage import UsageFilter

POLL_S = 0.2
"""The seconds between two checks for changed keys. Each is one small read of the store for all gateways. A gateway that
waits knows of a revoked key after at most one and a half of these periods.
"""
_LEAVING_S = 2.0
"""The seconds between two checks whether a polling gateway is still connected."""
_MOST, _LONGEST_POLL_S = 1000, 30.0


def tenancy_routes(service: TenancyService) -> APIRouter:
    router = APIRouter(prefix="/v1")
    slow, polls, reports = CapacityLimiter(2), CapacityLimiter(4), CapacityLimiter(4)

    latest = {"read_s": -math.inf, "revision": -1}

    async def revision() -> int:
        """Returns the revision of the key table, read at most half a polling period ago."""
        if (now_s := asyncio.get_running_loop().time()) - latest["read_s"] >= POLL_S / 2:
            latest["read_s"] = now_s
            latest["revision"] = await q.in_pool(polls, service.revision)
        return int(latest["revision"])

    @router.post("/keys")
    def create_key(caller: q.CallerInput, body: q.Body) -> Any:
        return to_json(service.create_key(body, caller))

    @router.get("/keys")
    def keys(caller: q.CallerInput, limit: q.Limit = 100, offset: q.Offset = 0, ended: bool = False) -> Any:
        return [to_json(view) for view in service.keys(caller, min(limit, _MOST), offset, ended=ended)]

    @router.get("/keys/{key_id}")
    def key(caller: q.CallerInput, key_id: q.Name) -> Any:
        return to_json(service.key(key_id, caller))

    @router.post("/keys/{key_id}/rotate")
    def rotate_key(caller: q.CallerInput, key_id: q.Name, grace_s: q.Grace = 0.0) -> Any:
        return to_json(service.rotate_key(key_id, caller, grace_s))

    @router.post("/keys/{key_id}/revoke")
    def revoke_key(caller: q.CallerInput, key_id: q.Name) -> Any:
        return to_json(service.revoke_key(key_id, caller))

    @router.get("/usage")
    async def usage(which: _Filter, limit: q.Limit = 100, before: q.Number = None) -> Any:
        return to_json(await q.in_pool(slow, service.usage, which, before, min(limit, _MOST)))

    @router.get("/usage/{by}")
    async def usage_sums(which: _Filter, by: UsageBy) -> Any:
        return [to_json(each) for each in await q.in_pool(slow, service.usage_sums, which, by)]

    @router.get("/audit")
    def audit(
        caller: q.CallerInput,
        actor: q.Word = None,
        action: q.Word = None,
        object: q.Word = None,
        since_s: q.Since = 0.0,
        until_s: q.Until = None,
        before: q.Number = None,
        limit: q.Limit = 100,
    ) -> Any:
        found = service.audit(caller).entries(
            actor=actor,
            action=action,
            object=object,
            since_s=since_s,
            until_s=until_s,
            before=before,
            limit=min(limit, _MOST),
        )
        return [to_json(entry) for entry in found]

    @router.get("/audit/verify")
    async def verify_audit(caller: q.CallerInput, head: q.Head = None) -> Any:
        seq, _, hash = (head or "").partition(":")
        return to_json(await q.in_pool(slow, service.audit(caller).verify, (int(seq), hash) if head else None))

    @router.get("/gateway/keys")
    async def key_table(request: Request) -> Response:
        """Responds once the revision differs from `newer_than`, or on a timeout. The gateway's presence is recorded
        afterwards, so that the news of a revoked key does not wait for this write.
        """
        poll, clock = q.Poll.from_request(request), asyncio.get_running_loop()
        until_s = clock.time() + min(poll.timeout_s, _LONGEST_POLL_S)
        leaving_s = clock.time() + _LEAVING_S
        while poll.newer_than == await revision() and clock.time() < until_s:
            await asyncio.sleep(POLL_S)
            if clock.time() >= leaving_s:  # an expensive question
                leaving_s += _LEAVING_S
                if await request.is_disconnected():
                    break
        found = to_json(await q.in_pool(polls, service.key_table, poll.newer_than))
        seen = BackgroundTask(q.in_pool, reports, service.seen, poll.gateway) if poll.gateway else None
        return Response(json.dumps(found), media_type="application/json", background=seen)

    @router.post("/gateway/reservations")
    async def reserve(body: q.Body) -> Any:
        return await q.in_pool(reports, service.reserve, body)

    @router.post("/gateway/usage")
    async def settle(body: q.Body) -> Any:
        return {"new": await q.in_pool(reports, service.settle, body)}

    return router


async def _filter(
    caller: q.CallerInput,
    key: q.Word = None,
    team: q.Word = None,
    user: q.Word = None,
    model: q.Word = None,
    since_s: q.Since = 0.0,
    until_s: q.Until = None,
) -> UsageFilter:
    """Returns the filter of a query, limited to the caller's team. Raises DeniedError if it asks for another team."""
    if team is not None and not caller.sees(team):
        raise DeniedError(f"the token of {caller.user} is for team {caller.team}, not {team}.", hint="Leave it out.")
    team = caller.only_team or team
    return UsageFilter(key=key, team=team, user=user, model=model, since_s=since_s, until_s=until_s)


_Filter = Annotated[UsageFilter, Depends(_filter)]
