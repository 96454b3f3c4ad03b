"""The input file of a batch, with one JSON line for each request. The whole file is checked before any request runs."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from raytide.actors.engine.limits import MAX_BODY_BYTES
from raytide.actors.serving.http.body import Outline, parse_json
from raytide.actors.serving.openai_api.errors import ApiError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_ROWS = 50_000
MAX_ERRORS = 100
"""The most errors that are reported for one input."""
_MAX_ID_CHARS = 512
_MODELS = 2


@dataclass(frozen=True, slots=True)
class InputError:
    """An error in line number `line`, counted from 1, or in the whole file if `line` is None."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class InputRow:
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(slots=True)
class BatchInput:
    """The rows of an input file, stored as byte offsets into the file. If the file is refused, `errors` contains the
    reasons.
    """

    path: Path
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    errors: list[InputError] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    """The models of the rows; no more than two are kept."""
    digest: str = ""
    """The file's SHA-256."""

    def __len__(self) -> int:
        return len(self.offsets)

    def row(self, place: int) -> InputRow:
        """Returns row number `place`, counted from 0. The input must have no errors."""
        with self.path.open("rb") as file:
            file.seek(self.offsets[place])
            found = _parsed(file.readline())
        return InputRow(found["custom_id"], found["url"], found["body"])

    @property
    def model(self) -> str | None:
        """The model that all rows name. None if the rows name several models or no model."""
        return next(iter(self.models)) if len(self.models) == 1 else None


def check_input(path: Path, url: str | None) -> BatchInput:
    """Reads the whole file and returns its rows, or its errors. Reading ends early at MAX_ERRORS errors, at a line that
    is too long, and at more than MAX_ROWS rows. `url` is the only URL that rows may name. If it is None, rows may name
    any of `URLS`.
    """
    found, digest, known = BatchInput(path), hashlib.sha256(), set[bytes]()
    with path.open("rb") as file:
        for number, offset, line in _lines(file):
            digest.update(line)
            if len(line) > MAX_BODY_BYTES:
                found.errors.append(
                    InputError("line_too_large", f"The line is longer than {MAX_BODY_BYTES} bytes.", number)
                )
                break
            if not line.strip():
                continue
            if len(found) == MAX_ROWS:
                found.errors.append(
                    InputError("too_many_requests", f"The file has more than {MAX_ROWS} requests.", number)
                )
                break
            if (error := _problem(line, number, url, known, found.models)) is not None:
                found.errors.append(error)
                if len(found.errors) == MAX_ERRORS:
                    break
            found.offsets.append(offset)
    if not found.offsets and not found.errors:
        found.errors.append(InputError("empty_file", "The file has no requests."))
    found.digest = digest.hexdigest()
    return found


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yields (line number from 1, offset in bytes, line). A line of more than MAX_BODY_BYTES comes cut, and is the last
    that a caller can use.
    """
    offset, number = 0, 1
    while line := file.readline(MAX_BODY_BYTES + 1):
        yield number, offset, line
        offset, number = offset + len(line), number + 1


def _problem(line: bytes, number: int, url: str | None, known: set[bytes], models: set[str]) -> InputError | None:
    """Returns the first problem of a line, or None. Adds the line's id to `known` and its model to `models`."""
    try:
        row = _parsed(line)
    except ApiError as error:
        return InputError("invalid_json_line", f"This line is not parseable as valid JSON. {error}", number)
    if not isinstance(row, Mapping):
        return InputError("invalid_json_line", "This line is not a JSON object.", number)
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if row.get(name) is None:
            return InputError("missing_required_parameter", f"Missing required parameter: {name}.", number, name)
        if not isinstance(row[name], kind):
            return InputError("invalid_type", f"{name} has the wrong type.", number, name)
    if not 0 < len(row["custom_id"]) <= _MAX_ID_CHARS:
        return InputError("invalid_value", f"custom_id has 1 to {_MAX_ID_CHARS} characters.", number, "custom_id")
    if row["method"] != "POST":
        return InputError("invalid_method", "method is not POST.", number, "method")
    if row["url"] not in ((url,) if url else URLS):
        wanted = f"{url}, the endpoint of this batch" if url else f"one of {', '.join(URLS)}"
        return InputError("invalid_url", f"url is not {wanted}.", number, "url")
    model = row["body"].get("model")
    if not isinstance(model, str) or not model:
        return InputError("missing_required_parameter", "Missing required parameter: body.model.", number, "body.model")
    if row["body"].get("stream"):
        return InputError("invalid_value", "body.stream is not possible in a batch.", number, "body.stream")
    digest = hashlib.blake2b(row["custom_id"].encode(errors="replace"), digest_size=16).digest()
    if digest in known:
        message = f"The custom_id {row['custom_id']} was used before."
        return InputError("duplicate_custom_id", message, number, "custom_id")
    known.add(digest)
    if len(models) < _MODELS:
        models.add(model)
    return None


def _parsed(line: bytes) -> Any:
    Outline().feed(line)
    return parse_json(line)
