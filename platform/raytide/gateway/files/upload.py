"""Reads a multipart upload while it arrives. Form fields go into memory and the file goes to the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from raytide.actors.engine.limits import BODY_TIMEOUT_S
from raytide.actors.serving.openai_api.errors import ApiError, invalid
from raytide.gateway.files.store import PartialFile

_MAX_FIELDS = 32
_MAX_FIELD_BYTES = 4096
_MAX_NAME_CHARS = 512
_GROUP_BYTES = 1 << 20
_UPLOAD_TIMEOUT_S = 3600.0


@dataclass(slots=True)
class UploadForm:
    """The form fields of an upload, and the name of the uploaded file. The name is None if the upload has no file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def read_upload(request: Request, part: PartialFile) -> UploadForm:
    """Writes the uploaded file, which is the form part named `file`, to `part`. Returns the form's other fields.

    Raises ApiError for an invalid body and StorageError for a full disk.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise invalid("The body is not multipart/form-data.", param=None, status=415)
    reader = _Reader()
    try:
        parser = MultipartParser(options[b"boundary"], reader.callbacks())  # type: ignore[arg-type]
        async with asyncio.timeout(_UPLOAD_TIMEOUT_S):
            async for chunk in _chunks(request):
                parser.write(chunk)
                if len(reader.pending) >= _GROUP_BYTES:
                    await asyncio.to_thread(part.write, reader.taken())
        parser.finalize()
        await asyncio.to_thread(part.write, reader.taken())
    except FormParserError as error:
        raise invalid(f"The body is not valid multipart/form-data: {error}.", param=None) from None
    except TimeoutError:
        raise _too_slow() from None
    except ClientDisconnect:
        raise invalid("The connection was closed before the body had come.", param=None) from None
    if not reader.is_complete:
        raise invalid("The body ends before its last part.", param=None)
    return reader.form


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """Yields the chunks of the body. Raises ApiError if the client sends nothing for too long."""
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise _too_slow() from None
        if chunk is None:
            return
        yield chunk


def _too_slow() -> ApiError:
    return invalid("The body did not come in time.", param=None, status=408)


class _Reader:
    """Receives the parser's events: fields, and the data of the file."""

    def __init__(self) -> None:
        self.form = UploadForm()
        self.pending = bytearray()
        """Bytes of the file that are not on the disk yet."""
        self.is_complete = False
        self._headers: dict[bytes, bytes] = {}
        self._header_name, self._header_value, self._value = bytearray(), bytearray(), bytearray()
        self._name, self._is_file, self._parts = "", False, 0

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def taken(self) -> bytes:
        data = bytes(self.pending)
        self.pending.clear()
        return data

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_FIELDS:
            raise invalid(f"The body has more than {_MAX_FIELDS} parts.", param=None)
        self._headers.clear()
        self._value.clear()

    def _end_header(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file and self.form.filename is not None:
            raise invalid("The body has more than one file.", param="file")
        if self._is_file:
            name = options.get(b"filename", b"upload").decode(errors="replace")
            name = "".join(char if char.isprintable() else "?" for char in name[:_MAX_NAME_CHARS])
            self.form.filename = name or "upload"

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        taker = self.pending if self._is_file else self._value
        taker.extend(data[start:end])
        if not self._is_file and len(taker) > _MAX_FIELD_BYTES:
            raise invalid(f"A field is longer than {_MAX_FIELD_BYTES} bytes.", param=self._name or None)

    def _end_part(self) -> None:
        if not self._is_file:
            self.form.fields[self._name] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self.is_complete = True
