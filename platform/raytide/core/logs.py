"""Logging as JSON lines: one object per line, for grep and for log collectors.

Modules use `log = logger(__name__)` and `log.info("lease is active", extra={"lease": "lease-3"})`. The message is
constant, and the fields hold what varies. A process calls `log_to` once. Before that, Python's usual logging applies.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="")
"""The trace that lines belong to; `raytide.core.telemetry.tracing` sets it."""
_SECRETS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), r"\1 ***"),
    (re.compile(r"\b(rk-|sk-|hf_|gh[pousr]_|xox[abprs]-|AKIA|ASIA)[\w-]{12,}"), r"\1***"),
    (re.compile(r"(://[^\s/:@]{0,100}):[^\s/@]{1,200}@"), r"\1:***@"),
    (
        re.compile(
            r"(?i)\b([\w-]{0,40}(?:password|passwd|secret|token|api_?key)[\"']?\s*[:=]\s*[\"']?)[^\s\"',;&}]{6,}"
        ),
        r"\1***",
    ),
)
"""Patterns of secrets, and the text in their place: credentials of HTTP, keys by their well-known beginnings,
passwords in URLs, and values of fields with telling names."""
_WRITTEN_LATER = frozenset({"message", "asctime", "taskName"})


def scrubbed(text: str) -> str:
    """Returns the text after replacing everything in it that looks like a secret."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Returns the fields that the caller passed: all attributes of the record except Python's own, those that a
    library's record factory (vLLM's) sets, and the private ones that Ray adds.
    """
    usual = vars(logging.makeLogRecord({})).keys() | _WRITTEN_LATER
    return {name: value for name, value in vars(record).items() if name not in usual and not name.startswith("_")}


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds fixed fields to each of its lines."""

    def __init__(self, logger: logging.Logger, fields: MutableMapping[str, object]) -> None:
        super().__init__(logger, fields)
        self._fields = fields

    def bind(self, **fields: object) -> Log:
        """Returns a logger that adds these fields, and this logger's own fields, to its lines:
        `log.bind(job=job.id)`."""
        return Log(self.logger, {**self._fields, **fields})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": {**self._fields, **(kwargs.get("extra") or {})}}


def logger(name: str, **fields: object) -> Log:
    return Log(logging.getLogger(name), fields)


class JsonLines(logging.Formatter):
    """Formats a log record as a JSON object with "at", "level", "logger", "message" and the record's fields. If there
    is an exception, "traceback" is added.

    Everything that looks like a secret is removed.
    """

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **_fields_of(record),
        }
        if trace_id := TRACE_ID.get():
            line["trace_id"] = trace_id
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = scrubbed(json.dumps(line, default=str, ensure_ascii=False))
        return text.encode(errors="backslashreplace").decode()  # lone surrogates cannot be encoded


def log_to(target: Path | IO[str] = sys.stderr, *, level: str = "INFO", **fields: object) -> None:
    """Sends the logs of this process to a file or stream, in place of earlier handlers."""
    handler: logging.Handler = (
        logging.FileHandler(target) if isinstance(target, Path) else logging.StreamHandler(target)
    )
    handler.setFormatter(JsonLines(**fields))
    root = logging.getLogger("raytide")
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False
