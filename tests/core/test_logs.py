from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytide.core.logs import log_to, logger, scrubbed


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger("raytide")
    before = (root.handlers[:], root.level, root.propagate)
    root.handlers[:] = []
    yield
    root.handlers[:], root.level, root.propagate = before


def test_a_line_is_one_json_object_with_its_fields() -> None:
    out = io.StringIO()
    log_to(out, process="controller")
    log = logger("raytide.test", lease="lease-1").bind(job="job-7")
    log.warning("lease is %s", "active", extra={"members": 2, "path": Path("/x"), "text": "a\nb"})
    log.debug("not at this level")
    (line,) = out.getvalue().splitlines()
    body = json.loads(line)
    assert body.pop("at").endswith("+00:00")
    assert body == {
        "level": "warning",
        "logger": "raytide.test",
        "message": "lease is active",
        "process": "controller",
        "lease": "lease-1",
        "job": "job-7",
        "members": 2,
        "path": "/x",
        "text": "a\nb",
    }


def test_an_exception_brings_its_traceback() -> None:
    out = io.StringIO()
    log_to(out)
    try:
        raise ValueError("odd")
    except ValueError:
        logger("raytide.test").exception("it failed")
    assert "ValueError: odd" in json.loads(out.getvalue())["traceback"]


def test_a_second_target_takes_the_place_of_the_first(tmp_path: Path) -> None:
    out = io.StringIO()
    log_to(out)
    log_to(tmp_path / "log.jsonl")
    logger("raytide.test").info("hello")
    assert out.getvalue() == ""
    assert json.loads((tmp_path / "log.jsonl").read_text())["message"] == "hello"
    log_to(out)


def test_what_a_library_adds_to_every_record_is_no_field(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = logging.getLogRecordFactory()

    def adding(*args: object, **kwargs: object) -> logging.LogRecord:
        record = usual(*args, **kwargs)
        record.vllm_process_name = "MainProcess"
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", adding)
    out = io.StringIO()
    log_to(out, process="replica")
    logger("raytide.test").warning("hello", extra={"job": "job-1"})
    assert json.loads(out.getvalue()).keys() == {"at", "level", "logger", "message", "process", "job"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abcdefgh12345678", "Authorization: Bearer ***"),
        ('{"api_key": "abcdef123456", "n": 1}', '{"api_key": "***", "n": 1}'),
        ("postgres://me:letmein@db/x", "postgres://me:***@db/x"),
        ("used sk-abcdefghijklmnop and AKIAABCDEFGHIJKLMNOP", "used sk-*** and AKIA***"),
        ("GET /v1/models?token=abcdef123456&x=1", "GET /v1/models?token=***&x=1"),
        ("12 tokens: 345 of max_tokens=8, a bearer of news", "12 tokens: 345 of max_tokens=8, a bearer of news"),
    ],
)
def test_what_looks_like_a_secret_is_not_written(text: str, shown: str) -> None:
    assert scrubbed(text) == shown
