"""The route `/v1/feedback`, on which users rate an answer. A rating contains the answer's response id. It also contains
either thumbs up or thumbs down, or the value of a metric that users define.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from raytide.actors.serving.openai_api.admission import caller_of
from raytide.actors.serving.openai_api.errors import invalid
from raytide.core.errors import NotFoundError, UsageError
from raytide.core.specs.rollout import Feedback, MetricName, MetricValue, Score, check_one_judgement
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.tenancy import GatewayCaller

_RESPONSE_ID = re.compile(r"(chatcmpl-|cmpl-|resp_|msg_)?[0-9a-f]{32}")
"""The pattern of response ids; the API is not asked for an id that does not match."""
_UNREPORTED_S = (0.6, 1.2)
"""The pauses in seconds before an unknown request is looked up again; gateways report ended requests twice a second."""


_NULL = {"type": "null"}
_ONE_JUDGEMENT: dict[str, Any] = {
    "anyOf": [
        {"required": ["score"], "properties": {"score": {"not": _NULL}, "metric": _NULL, "value": _NULL}},
        {
            "required": ["metric", "value"],
            "properties": {"score": _NULL, "metric": {"not": _NULL}, "value": {"not": _NULL}},
        },
    ]
}
"""The rule of `check_one_judgement`, in JSON Schema."""


class FeedbackRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_ONE_JUDGEMENT)

    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,100}$")]
    """The id of the response."""
    score: Score | None = None
    metric: MetricName | None = None
    value: MetricValue | None = None
    """The value of `metric` for this answer."""
    comment: Annotated[str, Field(max_length=4096)] = ""

    @model_validator(mode="after")
    def _one(self) -> Self:
        check_one_judgement(self.score, self.metric, self.value)
        return self


class FeedbackObject(BaseModel):
    object: Literal["feedback"] = "feedback"
    request_id: str
    score: Score | None
    metric: str | None
    value: float | None
    revision: int
    """The revision of the endpoint that gave the answer; 0 if it is not known."""


def add_feedback_routes(app: FastAPI, api: ControlApi, endpoint_of: Callable[[Request], str]) -> None:
    """Adds the route `/v1/feedback` to the app.

    `endpoint_of` returns the endpoint that the request's URL names. It returns "" if the URL names none.
    """

    @app.post("/v1/feedback")
    async def feedback(body: FeedbackRequest, request: Request) -> FeedbackObject:
        caller = caller_of(request.scope)
        key = caller.key.id if isinstance(caller, GatewayCaller) and caller.key is not None else ""
        given = Feedback(**body.model_dump(), team=caller.team, key=key, model=endpoint_of(request))
        pauses = (*_UNREPORTED_S, None) if _RESPONSE_ID.fullmatch(body.request_id) else ()
        for pause_s in pauses:
            try:
                revision = await api.save_feedback(given)
                return FeedbackObject(**body.model_dump(exclude={"comment"}), revision=revision)
            except UsageError as error:
                raise invalid(str(error), param="metric") from None
            except NotFoundError:
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
        message = f"There is no request {body.request_id!r} of yours, or it has not ended."
        raise invalid(message, param="request_id", code="not_found", status=404)
