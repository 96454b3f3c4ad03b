"""A request beyond a limit is refused by name, in OpenAI's words, and before it costs anybody anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp
from tests.actors.engine.tiny import save_llama
from tests.actors.serving.asgi import ask, timed_turns

from raytide.actors.engine import EngineConfig, NativeEngine, limits
from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.serving.http import body
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.http.body import Outline
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.actors.serving.openai_api.server import Server

TEXT, CHAT, EMBED = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
PANICS = {"type": "array", "minItems": 5000, "maxItems": 100_000, "items": {"type": "array", "minItems": 1000}}
"""The grammar's library panics of it."""
LONGEST_TURN_S = 0.1
"""Twice what is promised, since the processor's caches are shared; each of these took 0.2 s or more before."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_llama(path)
    return path


@pytest_asyncio.fixture
async def app(model_dir: Path) -> AsyncIterator[ASGIApp]:
    server = Server(NativeEngine(EngineConfig(model_dir=str(model_dir), max_running=128)), model="m")
    await server.start()
    yield create_app(server, owns_server=False)
    await server.stop()


def text(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "x", "max_tokens": 1, **fields}).encode()


def chat(messages: object, **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 1, **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "m" * 1025}, "model"),
        ({"prompt": ["x"] * (limits.MAX_PROMPTS + 1)}, "prompt"),
        ({"prompt": [[1]] * (limits.MAX_PROMPTS + 1)}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": ["x"] * 3, "n": 100}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words[0]"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"9" * 4000: 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 129}, "n"),
        ({"best_of": 129}, "best_of"),
        ({"top_k": 2**31}, "top_k"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"min_tokens": 10**400}, "min_tokens"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"priority": -(10**30)}, "priority"),
        ({"priority": -(2**31) - 1}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"guided_regex": "x" * (limits.MAX_GRAMMAR_CHARS + 1)}, "guided_regex"),
        ({"guided_choice": ["x" * 1000] * 200}, "guided_choice"),
        ({"guided_choice": [""]}, None),
        ({"guided_json": {"a": "x" * limits.MAX_GRAMMAR_CHARS}}, "guided_json"),
        ({"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, None),
        ({"guided_json": PANICS}, None),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_field_that_asks_for_too_much_is_a_400_that_names_it(
    app: ASGIApp, fields: dict[str, Any], param: str | None
) -> None:
    answer = await ask(app, TEXT, text(**fields))
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), answer.body
    assert answer.error["param"] == param
    assert len(answer.body) < 4000, "the error repeats the request"
    assert (await ask(app, TEXT, text())).status == 200


@pytest.mark.parametrize("path", [TEXT, CHAT, EMBED])
async def test_a_body_over_the_limit_is_a_413_whatever_its_length_says(app: ASGIApp, path: str) -> None:
    announced = await ask(app, path, [], content_length=str(limits.MAX_BODY_BYTES + 1))
    absurd = await ask(app, path, [], content_length="9" * 4000)
    streamed = await ask(app, path, (b" " * (1 << 20) for _ in range(6)))  # type: ignore[arg-type]
    for answer in (announced, absurd, streamed):
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("path", [TEXT, CHAT, EMBED])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"model": "\xed\xa0\x80"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 100_000,
        b'{"model": "m", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": NaN}',
        b'{"model": Infinity}',
        b'{"model": "m", "prompt": "x", "input": "x", "messages": [], "metadata": {"a": 1e999}}',
        b'{"model": "m", "prompt": "x", "input": "x", "messages": [], "user": -1e400}',
        b"null",
        b'"m"',
        b"[1]",
        b'{"model": "m"} trailing',
        b'{"\\ud800": 1}',
        b'{"model": "\\udfff", "prompt": "x", "input": "x", "messages": []}',
        b'{"model": "m", "prompt": "\\ud800", "input": "\\ud800", "messages": [{"role": "user", "content": "\\ud8"}]}',
        b'{"model": "m", "prompt": ["\\ud83d"], "input": ["a", "\\ude00\\ud83d"], "messages": [{"role": "\\ud800"}]}',
    ],
    ids=lambda raw: str(raw[:24]),
)
async def test_what_is_no_json_or_no_text_is_a_400(app: ASGIApp, path: str, raw: bytes) -> None:
    answer = await ask(app, path, raw)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), answer.body


async def test_whole_surrogate_pairs_and_texts_that_look_like_halves_are_text(app: ASGIApp) -> None:
    for prompt in (b"\\ud83d\\ude00", b"\\\\ud800", b"\\\\\\\\udfff"):
        answer = await ask(app, TEXT, b'{"model": "m", "max_tokens": 1, "prompt": "' + prompt + b'"}')
        assert answer.status == 200, answer.body


async def test_other_types_and_encodings_of_a_body_are_refused(app: ASGIApp) -> None:
    assert (await ask(app, TEXT, text(), content_type="text/plain")).status == 415
    assert (await ask(app, TEXT, text(), content_type="multipart/form-data; boundary=x")).status == 415
    assert (await ask(app, TEXT, text(), content_encoding="gzip")).status == 415


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/models/", "/health/"])
async def test_no_answer_sends_a_client_to_a_host_that_the_request_names(app: ASGIApp, path: str) -> None:
    answer = await ask(app, path, b"{}", host="evil.example")
    assert answer.status == 404
    assert answer.error["type"] == "invalid_request_error"


async def test_a_body_that_does_not_come_is_given_up(app: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each connection that sends a byte and no more takes one of the replica's places for ever."""
    import asyncio

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(body.JsonBody, "stream", lambda self: _stuck())
    assert (await ask(app, TEXT, text())).status == 408


async def _stuck() -> AsyncIterator[bytes]:
    import asyncio

    yield b"{"
    await asyncio.Event().wait()


async def test_a_body_that_breaks_off_is_no_failure_of_the_server(app: ASGIApp) -> None:
    answer = await ask(app, TEXT, [b'{"model": "m", "pro'], leaves=True)
    assert answer.status in (0, 400)


HEAVY = {
    "one long text": (TEXT, text(prompt="hello world " * 340_000)),
    "many escapes": (TEXT, b'{"model": "m", "prompt": "' + b"\\u0041" * 690_000 + b'"}'),
    "token ids": (TEXT, text(prompt=[1] * 262_000)),
    "short lists": (TEXT, text(prompt=[[1]] * 130_000)),
    "short texts": (TEXT, text(prompt=["ab"] * 260_000)),
    "128 long texts": (TEXT, text(prompt=["hello " * 5000] * 128)),
    "128 short texts": (TEXT, text(prompt=["hello " * 300] * 128)),
    "2,048 inputs": (EMBED, json.dumps({"model": "m", "input": ["hello " * 40] * 2048}).encode()),
    "messages": (CHAT, chat([{"role": "user", "content": "x"}] * 60_000)),
    "allowed messages": (CHAT, chat([{"role": "user", "content": "x"}] * 4096)),
    "parts": (CHAT, chat([{"role": "user", "content": [{"type": "text", "text": "x"}] * 4096}] * 3)),
    "bias": (TEXT, text(logit_bias={str(token): 1 for token in range(100_000)})),
    "unknown fields": (TEXT, text(**{f"k{i}": 1 for i in range(100_000)})),
    "ignored field": (TEXT, text(metadata=[[1]] * 80_000)),
    "schema": (TEXT, text(guided_json={"properties": {f"p{i}": {} for i in range(20_000)}})),
    "choices": (TEXT, text(guided_choice=["a"] * 250_000)),
    "stop tokens": (TEXT, text(stop_token_ids=[1] * 250_000)),
    "digits": (TEXT, b'{"model": "m", "prompt": "x", "temperature": 0.' + b"9" * 4_000_000 + b"}"),
    "escaped quotes": (TEXT, b'{"model": "m", "prompt": "' + b'\\"' * 2_000_000),
}


@pytest.mark.parametrize("name", HEAVY)
async def test_no_body_holds_up_the_event_loop(app: ASGIApp, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, raw = HEAVY[name]
    await ask(app, path, text(input="x", messages=[{"role": "user", "content": "x"}]))  # what is loaded once, is
    with timed_turns(monkeypatch) as turns:
        answer = await ask(app, path, raw)
    assert answer.status in (200, 400), answer.body
    assert turns.longest_s < LONGEST_TURN_S


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a",:[]{}\\\u00e9', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def shape(value: object) -> tuple[int, int, int, int]:
    """Values, texts and keys, lists and objects, depth."""
    if not isinstance(value, list | dict):
        return 1, int(isinstance(value, str)), 0, 0
    inside = [shape(each) for each in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return (
        1 + sum(each[0] for each in inside),
        keys + sum(each[1] for each in inside),
        1 + sum(each[2] for each in inside),
        1 + max((each[3] for each in inside), default=0),
    )


@given(JSON, st.integers(1, 9), st.booleans())
def test_the_outline_of_a_body_is_exact_however_it_is_cut(value: object, size: int, escapes: bool) -> None:
    raw, outline = json.dumps(value, ensure_ascii=escapes).encode(), Outline()
    deepest = 0
    for at in range(0, len(raw), size):
        outline.feed(raw[at : at + size])
        deepest = max(deepest, outline._depth)
    values, texts, containers, depth = shape(value)
    # An empty list or object counts as if it had one value.
    assert values <= outline._values <= values + containers
    assert (outline._texts, outline._containers, outline._depth) == (texts, containers, 0)
    assert deepest <= depth


def test_an_outline_refuses_before_the_parser_sees_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for raw in (b"[" * 65, b'{"a":' * 65, b"0," * limits.MAX_JSON_VALUES, b'"",' * (limits.MAX_JSON_TEXTS + 1)):
        with pytest.raises(ApiError, match="more than"):
            Outline().feed(raw)


async def test_a_request_of_an_unknown_sender_is_not_more_urgent_than_the_others() -> None:
    asked = []

    class Noting(FakeEngine):
        def generate(self, request):  # type: ignore[no-untyped-def]
            asked.append(request.priority)
            return super().generate(request)

    for least in (0, -5):
        server = Server(Noting(), model="m", min_priority=least)
        await server.start()
        app = create_app(server, owns_server=False)
        for priority in (-(10**9), -3, 0, 7):
            assert (await ask(app, TEXT, text(priority=priority))).status == 200
    assert asked == [0, 0, 0, 7, -5, -3, 0, 7]
