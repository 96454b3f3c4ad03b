"""The objects of OpenAI's batch API, as clients see them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from raytide.actors.engine.limits import MAX_NAME_CHARS
from raytide.actors.serving.batch.progress_file import RowUsage

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
FINAL: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ExpiresAfter(_Body):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86_400)]


class BatchRequest(_Body):
    """The body that creates a batch."""

    input_file_id: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class BatchErrorItem(BaseModel):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchErrorItem]


class RequestCounts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(BaseModel):
    cached_tokens: int = 0


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class BatchTokens(BaseModel):
    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0

    @classmethod
    def of_rows(cls, usage: RowUsage) -> BatchTokens:
        return cls(
            input_tokens=usage.input_tokens,
            input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.input_tokens + usage.output_tokens,
        )


class BatchObject(BaseModel):
    """A batch, as the API shows it. Its times are Unix seconds. Its status changes as follows:

    - `validating` -> `in_progress` -> `finalizing` -> `completed`, by the gateway process that works on the batch
    - `validating` -> `failed`, if the input file is wrong
    - `validating` or `in_progress` -> `cancelling`, by the client; then `cancelling` -> `cancelled`, by the gateway
      process
    - `in_progress` -> `expired`, at `expires_at`, if some rows have no result by then
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchTokens | None = None
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = Field(default=None, exclude=True)


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
