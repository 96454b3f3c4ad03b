"""The routes `/v1/files`: upload, list, retrieve, delete and content."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import FileResponse

from raytide.actors.engine.limits import MAX_NAME_CHARS
from raytide.actors.serving.openai_api.admission import caller_of
from raytide.actors.serving.openai_api.errors import ApiError, ErrorBody, invalid, overloaded
from raytide.gateway.files.store import UPLOAD_PURPOSES, FileDeletion, FileObject, FileObjectList, FileStore
from raytide.gateway.files.upload import UploadForm, read_upload

EXPIRY_S = (3600, 30 * 86_400)
"""The shortest and the longest time after which a file may expire."""
_MAX_UPLOADS, _MAX_TEAM_UPLOADS = 8, 4
_MOST_LISTED = 10_000
_UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(UPLOAD_PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": EXPIRY_S[0], "maximum": EXPIRY_S[1]},
                    },
                    "dependentRequired": {
                        "expires_after[anchor]": ["expires_after[seconds]"],
                        "expires_after[seconds]": ["expires_after[anchor]"],
                    },
                }
            }
        },
    }
}

Cursor = Annotated[str | None, Query(max_length=MAX_NAME_CHARS)]


def team_of(request: Request) -> str:
    """Returns the team of the request's caller. A middleware has already identified the caller."""
    return caller_of(request.scope).team


def add_file_routes(app: FastAPI, files: FileStore) -> None:
    uploads: Counter[str] = Counter()
    """The number of running uploads by team."""

    refusals: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (507,)}

    @app.post("/v1/files", openapi_extra=_UPLOAD_BODY, responses=refusals)
    async def upload_file(request: Request) -> FileObject:
        team = team_of(request)
        if uploads.total() >= _MAX_UPLOADS or uploads[team] >= _MAX_TEAM_UPLOADS:
            raise overloaded(f"{uploads.total()} uploads are running, {uploads[team]} of them of your team.")
        uploads[team] += 1
        try:
            await asyncio.to_thread(_check_length, files, request)
            with ExitStack() as stack:
                part = await asyncio.to_thread(stack.enter_context, files.partial())
                form = await read_upload(request, part)
                purpose, seconds = _checked(form)
                return await asyncio.to_thread(
                    files.add,
                    part,
                    team,
                    filename=form.filename or "upload",
                    purpose=purpose,
                    expires_after_s=seconds,
                )
        finally:
            uploads[team] -= 1
            if not uploads[team]:
                del uploads[team]

    @app.get("/v1/files")
    def list_files(
        request: Request,
        after: Cursor = None,
        limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = _MOST_LISTED,
        order: Literal["asc", "desc"] = "desc",
        purpose: Cursor = None,
    ) -> FileObjectList:
        return files.page(team_of(request), after=after, limit=limit, is_ascending=order == "asc", purpose=purpose)

    @app.get("/v1/files/{file_id}")
    def retrieve_file(file_id: str, request: Request) -> FileObject:
        return files.get(team_of(request), file_id)

    @app.delete("/v1/files/{file_id}")
    def delete_file(file_id: str, request: Request) -> FileDeletion:
        return files.delete(team_of(request), file_id)

    @app.get("/v1/files/{file_id}/content", response_class=FileResponse)
    def file_content(file_id: str, request: Request) -> Response:
        found, path = files.content(team_of(request), file_id)
        return FileResponse(path, media_type="application/octet-stream", filename=found.filename)


def _check_length(files: FileStore, request: Request) -> None:
    """Refuses an upload whose Content-Length is too large, before the body is sent."""
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdecimal() and len(length) < 18 else 0
    if size > files.limits.file_bytes + (1 << 20):
        raise invalid(f"The file is larger than {files.limits.file_bytes} bytes.", param="file", status=413)
    with files.database.read() as connection:
        files.check_room(connection, team_of(request), 0)


def _checked(form: UploadForm) -> tuple[str, int | None]:
    """Returns the purpose of a file and the seconds until it expires, or None. Raises ApiError for missing or wrong
    fields.
    """
    if form.filename is None:
        raise _missing("file")
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise _missing("purpose")
    if purpose not in UPLOAD_PURPOSES:
        raise invalid(f"{purpose!r} is not one of {list(UPLOAD_PURPOSES)}.", param="purpose")
    expiry = {name[14:-1]: text for name, text in form.fields.items() if name.startswith("expires_after[")}
    return purpose, expiry_of(expiry, "expires_after") if expiry else None


def expiry_of(fields: Mapping[str, Any], param: str) -> int:
    """Returns the number of seconds of an expiry `{anchor, seconds}`. `fields` contains the two fields, from a form or
    from a JSON object.

    Raises an ApiError about the parameter `param` if the expiry is invalid.
    """
    if fields.get("anchor") != "created_at":
        raise invalid("The anchor is created_at.", param=f"{param}.anchor")
    text = str(fields.get("seconds", ""))
    low, high = EXPIRY_S
    if not text.isdecimal() or len(text) > 9 or not low <= int(text) <= high:
        raise invalid(f"The seconds are {low} to {high}.", param=f"{param}.seconds")
    return int(text)


def _missing(name: str) -> ApiError:
    return invalid(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
