"""Random, huge, truncated and hostile requests to every route of the serving API: none is answered with a 5xx, none
ends the engine, none leaves memory taken.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route
from starlette.types import ASGIApp
from tests.actors.engine.tiny import save_llama
from tests.actors.serving.asgi import Answer, ask

from raytide.actors.engine import EngineConfig, NativeEngine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.pooling.scores import RerankRequest, ScoreRequest
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import ChatRequest, CompletionRequest
from raytide.actors.serving.protocols.messages_api.request import MessagesRequest
from raytide.actors.serving.protocols.responses_api.request import ResponsesRequest
from raytide.actors.serving.protocols.tokens import TokenizeRequest

TEXT, CHAT, EMBED = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
RESPONSES, SCORE, RERANK = "/v1/responses", "/v1/score", "/v1/rerank"
MESSAGES, COUNT, TOKENIZE, DETOKENIZE = "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"
INPUT = "/v1/responses/input_tokens"
OTHERS = (
    *("/v1/models", "/v1/models/m", "/v1/models/\ufffd", "/health", "/metrics", "/docs", "/nothing"),
    *("/v1/responses/resp_1", "/v1/responses/\ufffd", "/v1/responses/resp_1/input_items"),
)
VALID: dict[str, dict[str, Any]] = {
    TEXT: {"model": "m", "prompt": "hello", "max_tokens": 2},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    EMBED: {"model": "m", "input": "hello"},
    RESPONSES: {"model": "m", "input": "hello", "max_output_tokens": 2},
    SCORE: {"model": "m", "text_1": "hello", "text_2": ["tide"]},
    RERANK: {"model": "m", "query": "hello", "documents": ["tide", {"text": "ebb"}]},
    INPUT: {"model": "m", "input": "hello"},
    MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    COUNT: {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
    TOKENIZE: {"model": "m", "prompt": "hello"},
    DETOKENIZE: {"model": "m", "tokens": [1, 2]},
}
FIELDS = sorted(
    {
        *CompletionRequest.model_fields,
        *ChatRequest.model_fields,
        *ResponsesRequest.model_fields,
        *ScoreRequest.model_fields,
        *MessagesRequest.model_fields,
        *TokenizeRequest.model_fields,
        *RerankRequest.model_fields,
        "input",
        "encoding_format",
        "dimensions",
        "tools",
        "user",
    }
)
GRAMMARS = (
    "a*", "(a|b)*a(a|b){20}", "(.*a.{30}){10}", "(((a{1,99}){1,99}){1,99})", "[^\\s\\S]", "(" * 500, "(?=a)", "\\",
    "root ::= root root | root", "root ::= a\na ::= a a | \"x\"", "start: start", '{"type": "string"}', "{", "",
)  # fmt: skip
SCHEMAS = (
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"$ref": "http://127.0.0.1/x"},
    {"type": "string", "pattern": "(a|b)*a(a|b){20}"}, {"type": "string", "minLength": 10**9}, {"enum": []},
    {"type": "array", "minItems": 5000, "maxItems": 10**6, "items": {"type": "array", "minItems": 10**3}},
    {"type": "integer", "multipleOf": 99991}, {"type": "number", "minimum": 1e300}, {"allOf": [{"$ref": "#"}] * 50},
    {"anyOf": [{"type": "string", "maxLength": n} for n in range(200)]}, {"properties": {"": {}}}, {"type": "nope"},
    {"$defs": []}, {"definitions": 1},
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 127, 2**31, -(2**31), 2**63, -(2**63), 10**400, 1e308, -1e308, 5e-324, 0.1)
TEXTS = (
    "",
    "x",
    "\x00",
    "\ud800",
    "\U0001f600",
    "\ufdd0",
    "<eos>",
    "{{ 7 * 7 }}",
    "a" * 5000,
    " " * 30_000,
    "{% x %}",
)

hostile = st.recursive(
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.text(max_size=20),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.sampled_from((*FIELDS, "type", "role", "content", "text", "1", "")), inner, max_size=4),
        st.tuples(inner, st.sampled_from((2, 50, 1500))).map(lambda pair: [pair[0]] * pair[1]),
    ),
    max_leaves=6,
)
structured = st.one_of(
    st.sampled_from(GRAMMARS).map(lambda text: {"guided_regex": text}),
    st.sampled_from(GRAMMARS).map(lambda text: {"guided_grammar": text}),
    st.sampled_from(SCHEMAS).map(lambda schema: {"guided_json": schema}),
    st.sampled_from(SCHEMAS).map(
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    ),
    st.sampled_from(SCHEMAS).map(
        lambda schema: {
            "tools": [{"type": "function", "function": {"name": "x", "parameters": schema}}],
            "tool_choice": "required",
        }
    ),
    st.lists(st.sampled_from(TEXTS), max_size=3).map(lambda choices: {"structured_outputs": {"choice": choices}}),
)
sane = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 8),
        "best_of": st.integers(1, 8),
        "logprobs": st.sampled_from((True, 0, 5, 20)),
        "top_logprobs": st.integers(0, 20),
        "echo": st.booleans(),
        "stream": st.booleans(),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(1e-9, 1),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.01, 100),
        "stop": st.lists(st.sampled_from(TEXTS), max_size=4),
        "bad_words": st.lists(st.sampled_from(TEXTS[1:]), max_size=4),
        "logit_bias": st.dictionaries(st.integers(0, 600).map(str), st.floats(-100, 100), max_size=5),
        "stop_token_ids": st.lists(st.integers(0, 600), max_size=300),
        "min_tokens": st.integers(0, 3),
        "max_tokens": st.integers(1, 300),
        "ignore_eos": st.booleans(),
        "seed": st.sampled_from(NUMBERS),
        "prompt": st.sampled_from(("x", ["x", "y"], [1, 2], [[1], [2, 3]], [[]], [511] * 255, [511] * 256, ["x", 1])),
    },
)
bodies = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), hostile, max_size=4),
    sane,
    structured,
    st.tuples(sane, structured).map(lambda pair: pair[0] | pair[1]),
)


class Rig:
    """One app over a real engine, for many requests, on a loop of its own."""

    def __init__(self, model_dir: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._server = Server(NativeEngine(EngineConfig(model_dir=str(model_dir), block_size=16)), model="m")
        self._loop.run_until_complete(self._server.start())
        self._app: ASGIApp = create_app(self._server, owns_server=False)

    def ask(self, path: str, body: bytes = b"", **options: Any) -> Answer:
        return self._loop.run_until_complete(asyncio.wait_for(ask(self._app, path, body, **options), 60))

    def check(self, path: str, body: bytes = b"", **options: Any) -> Answer:
        """Ask, and hold the answer against what every route promises."""
        answer = self.ask(path, body, **options)
        assert answer.status < 500, answer.body[:500]
        if answer.status >= 400:
            told = {"type", "message"} if path.startswith(MESSAGES) else {"message", "type", "param", "code"}
            assert set(answer.error) - {"details"} == told
            assert len(answer.body) < 10_000
        elif b"data: [DONE]" in answer.body[-20:] or not answer.body.startswith(b"data:"):
            answer.body.decode()
        else:  # a stream that broke off says why, and that is not the server's fault
            last = json.loads(answer.body.rstrip().rpartition(b"data: ")[2])
            assert last["error"]["code"] == "engine", last
        return answer

    def is_well(self) -> bool:
        stats = self._loop.run_until_complete(self._server.engine.stats())
        return (
            self.ask("/health", method="GET").status == 200
            and self.check(TEXT, dumps(VALID[TEXT])).status == 200
            and (stats.running + stats.waiting == 0)
        )

    def close(self) -> None:
        self._loop.run_until_complete(self._server.stop())
        self._loop.close()


def dumps(body: object) -> bytes:
    return json.dumps(body).encode()[: 6 << 20]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    model_dir = tmp_path_factory.mktemp("model")
    save_llama(model_dir)
    rig = Rig(model_dir)
    yield rig
    assert rig.is_well()
    rig.close()


FUZZ = settings(max_examples=80, suppress_health_check=list(HealthCheck), derandomize=True)


@FUZZ
@given(st.sampled_from(tuple(VALID)), bodies)
def test_no_body_is_the_servers_failure(rig: Rig, path: str, fields: dict[str, Any]) -> None:
    rig.check(path, dumps(VALID[path] | fields))


@FUZZ
@given(
    st.sampled_from(tuple(VALID)),
    st.one_of(
        st.binary(max_size=200),
        hostile.map(dumps),
        st.tuples(bodies.map(lambda fields: dumps(VALID[TEXT] | fields)), st.floats(0, 1)).map(
            lambda pair: pair[0][: int(len(pair[0]) * pair[1])]
        ),
    ),
    st.booleans(),
)
def test_no_bytes_are_the_servers_failure(rig: Rig, path: str, raw: bytes, leaves: bool) -> None:
    rig.check(path, raw, leaves=leaves)


@FUZZ
@given(
    st.sampled_from((*VALID, *OTHERS)),
    st.sampled_from(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "X")),
    st.sampled_from(
        ("application/json", "text/plain", "", "application/json; charset=utf-16", "a/b; c=\xff", "/" * 9000)
    ),
    st.sampled_from((b"", b"{}", dumps(VALID[TEXT]), b"\x00" * 70_000)),
)
def test_no_method_or_header_is_the_servers_failure(
    rig: Rig, path: str, method: str, content_type: str, raw: bytes
) -> None:
    answer = rig.ask(path, raw, method=method, content_type=content_type, x_request_id="x" * 9000)
    assert answer.status < 500


def test_every_route_is_among_those_that_are_tried(rig: Rig) -> None:
    tried = {*VALID, *OTHERS} | {
        "/v1/models/{model:name}",
        "/v1/responses/{response_id:response_id}",
        "/v1/responses/{response_id:response_id}/input_items",
        "/version",
        "/v2/rerank",
        "/rerank",
        "/score",
        "/openapi.json",
        "/docs/oauth2-redirect",
        "/redoc",
    }
    assert {route.path for route in rig._app.routes if isinstance(route, Route)} <= tried  # type: ignore[attr-defined]


def test_hostile_requests_leave_no_memory_taken(rig: Rig) -> None:
    """Each round is of other bodies than the one before, so that whatever is kept by what was sent adds up."""
    random.seed(14)

    def send(count: int) -> None:
        for number in range(count):
            noise = random.randbytes(8_000).hex()
            for fields in (
                {"guided_regex": f"({noise}"},
                {"guided_json": {"type": noise}},
                {"guided_grammar": noise},
                {"guided_choice": [noise, ""]},
                {"guided_regex": noise[:4_000]},
                {"prompt": noise},
                {"prompt": [noise] * 100},
                {"cache_salt": noise[:1000]},
                {"model": noise[:1000]},
                {noise: 1},
                {"bad_words": [noise[at : at + 250] for at in range(0, 16_000, 250)]},
                {"stop": [noise[at : at + 250] for at in range(0, 1000, 250)]},
                {"user": noise, "metadata": {noise: noise}},
            ):
                rig.check(TEXT, dumps(VALID[TEXT] | fields))
            rig.check(CHAT, dumps(VALID[CHAT] | {"messages": [{"role": "user", "content": noise}] * 20}))
            rig.check(EMBED, dumps({"model": "m", "input": [noise[:200]] * 20}))
            rig.check(TEXT, b" " * (5 << 20))
            rig.ask(f"/v1/models/{noise[:5000]}", method="GET")
            rig.ask(f"/{noise[:5000]}/v1/{number}", method="GET")
        gc.collect()

    send(12)  # pools, caches with a bound and the allocator's own reserves fill first
    before = psutil.Process().memory_info().rss
    send(25)
    assert psutil.Process().memory_info().rss - before < 50 << 20
