"""2,000 malformed bodies: the gateway answers each with a 4xx and OpenAI's error body, and never with a 422."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp
from tests.actors.serving.asgi import ask

from raytide.actors.engine import FakeEngine
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.serving.ray_serve.keys import ReplicaAddress
from raytide.core.objects.endpoint import ServeSpec
from raytide.gateway.app import create_app
from raytide.gateway.batches.service import BatchService
from raytide.gateway.models import EndpointModels
from raytide.gateway.replicas.directory import EndpointEntry
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.tenancy import Tenancy

COUNT, SEED = 2000, 16
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "m", "prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/embeddings": {"model": "m", "input": "hello"},
    "/v1/responses": {"model": "m", "input": "hello", "max_output_tokens": 2},
    "/v1/score": {"model": "m", "text_1": "hello", "text_2": ["tide", "ebb"]},
    "/v1/rerank": {"model": "m", "query": "hello", "documents": ["tide", {"text": "ebb"}]},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/detokenize": {"model": "m", "tokens": [1, 2]},
}
WRONG: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {
        "prompt": [None, 5, {}, [], [[]], ["a", 1], [-1], [1.5], ["a", None], [[1, "a"]]],
        "logprobs": [-1, 21, "x", 1.5],
        "suffix": ["x"],
        "echo": ["x", 3],
    },
    "/v1/chat/completions": {
        "messages": [None, "x", [], [1], [{}], [{"role": "nobody", "content": "x"}], [{"role": "user"}]],
        "tools": [5, [5], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}]],
        "tool_choice": ["maybe", "required", 5, {"type": "x"}, {"type": "function"}],
        "top_logprobs": [3, -1, 21, "x"],
        "response_format": [5, {}, {"type": "x"}, {"type": "json_schema"}],
    },
    "/v1/embeddings": {"input": [None, 5, [], "", [[]], [None]], "encoding_format": ["x", 5], "dimensions": [0, "x"]},
    "/v1/score": {"text_1": [None, 5, "", [], ["a", "b", "c"], ["a", 1]], "text_2": [None, [[]], [""], {"text": "a"}]},
    "/v1/rerank": {
        "query": [None, 5, "", [], ["a"], {"text": "a"}],
        "documents": [None, "x", [], [""], [5], [{}], [{"text": ""}], [{"text": "a", "image": "b"}]],
        "top_n": [-1, 1.5, "x", 2**40],
        "return_documents": [1, "yes"],
    },
    "/v1/responses": {
        "input": [None, 5, [], [5], [{"type": "x"}], [{"role": "nobody", "content": "x"}]],
        "tools": [5, [5], [{"type": "web_search"}], [{"type": "function"}]],
        "temperature": [-1, 9, "hot"],
        "previous_response_id": ["resp_1"],
        "max_output_tokens": [0, -1, "x"],
    },
    "/v1/messages": {
        "messages": [None, "x", [], [1], [{"role": "user"}], [{"role": "tool", "content": "x"}]],
        "system": [5, [5], [{"type": "image"}]],
        "tools": [5, [5], [{}], [{"name": "a b", "input_schema": {}}], [{"type": "bash_20250124", "name": "bash"}]],
        "tool_choice": ["auto", {"type": "x"}, {"type": "tool"}, {"type": "any"}],
        "max_tokens": [None, 0, -1, "x"],
        "thinking": [True, {}, {"type": "enabled"}, {"type": "enabled", "budget_tokens": 0}],
        "output_config": ["x", {"effort": 5}, {"format": {"type": "text"}}],
        "stop_sequences": ["x", [""], [5], ["x"] * 50],
    },
    "/detokenize": {"tokens": [None, "x", [-1], [1.5], ["x"], [[1]]]},
}
GENERATION: dict[str, list[Any]] = {
    "temperature": [-1, 9, "hot", [], {}],
    "top_p": [-1, 1.1, 2, "x"],
    "n": [0, -1, 1.5, 1000, "x"],
    "max_tokens": [0, -1, 1.5, "x", 2**40],
    "stop": [5, [5], ["", "a"], ["a"] * 50, {}],
    "seed": [1.5, "x", 2**64, []],
    "logit_bias": [[], {"x": 1}, {"1": 1000}, {"1": "x"}],
    "stream": ["maybe", 3, []],
    "stream_options": [5, {"include_usage": "x"}],
    "presence_penalty": [3, "x"],
    "frequency_penalty": [-3, []],
    "priority": [1.5, "x"],
}
for _path in ("/v1/completions", "/v1/chat/completions"):
    WRONG[_path] |= GENERATION


EXPIRY = {"anchor": "created_at", "seconds": 3600}
BATCH = {"input_file_id": "FILE", "endpoint": "/v1/completions", "completion_window": "24h"}
WRONG["/v1/batches"] = {
    "input_file_id": [None, 5, "", "file-other", "../../etc/passwd", "x" * 2000],
    "endpoint": [None, 5, "", "/v1/files", "/v1/models"],
    "completion_window": [None, "1h", 24],
    "metadata": [5, [], {"a": 5}, {"a": "x" * 513}, {"x" * 65: "a"}, {str(n): "x" for n in range(17)}],
    "output_expires_after": [5, {}, EXPIRY | {"anchor": "x"}, EXPIRY | {"seconds": 5}, EXPIRY | {"seconds": "x"}],
}
"""`FILE` stands for the id of an uploaded file."""
BOUNDARY = "tide"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"


def truncated(chance: random.Random, path: str) -> bytes:
    whole = json.dumps(VALID[path]).encode()
    return whole[: chance.randrange(len(whole))]


def noise(chance: random.Random, path: str) -> bytes:
    return chance.randbytes(chance.randrange(1, 300))


def no_object(chance: random.Random, path: str) -> bytes:
    return json.dumps(chance.choice([5, "x", None, [], [VALID[path]], True])).encode()


def without_a_field(chance: random.Random, path: str) -> bytes:
    optional = {"max_tokens", "max_output_tokens"} if path != "/v1/messages" else set()
    optional |= {"model"} if path == "/detokenize" else set()
    left_out = chance.choice([name for name in VALID[path] if name not in optional])
    return json.dumps({name: value for name, value in VALID[path].items() if name != left_out}).encode()


def wrong_value(chance: random.Random, path: str) -> bytes:
    name = chance.choice(list(WRONG[path]))
    return json.dumps(VALID[path] | {name: chance.choice(WRONG[path][name])}).encode()


def wrong_model(chance: random.Random, path: str) -> bytes:
    return json.dumps(
        VALID[path] | {"model": chance.choice([5, [], "", "other", "m/../m", "\x00", "x" * 2000])}
    ).encode()


def unknown_field(chance: random.Random, path: str) -> bytes:
    return json.dumps(VALID[path] | {f"field_{chance.randrange(10**6)}": chance.choice([1, "x", [], {}])}).encode()


def too_deep(chance: random.Random, path: str) -> bytes:
    depth = chance.randrange(70, 5000)
    return json.dumps(VALID[path])[:-1].encode() + b', "user": ' + b"[" * depth + b"]" * depth + b"}"


def no_json_value(chance: random.Random, path: str) -> bytes:
    value = chance.choice([b"NaN", b"Infinity", b'"\xff\xfe"', b'"\\ud800"', b"01", b"'x'", b"1" * 5000])
    return json.dumps(VALID[path])[:-1].encode() + b', "user": ' + value + b"}"


KINDS: list[Callable[[random.Random, str], bytes]] = [
    truncated, noise, no_object, without_a_field, wrong_value, wrong_value, wrong_value, wrong_model, unknown_field,
    too_deep, no_json_value,
]  # fmt: skip


def form(*parts: tuple[str, bytes], boundary: str = BOUNDARY) -> bytes:
    """Returns a multipart body of parts, each with the parameters of its content disposition."""
    heads = [f"--{boundary}\r\ncontent-disposition: form-data; {named}\r\n\r\n".encode() for named, _ in parts]
    whole = b"".join(head + content + b"\r\n" for head, (_, content) in zip(heads, parts, strict=True))
    return whole + f"--{boundary}--\r\n".encode()


ROW = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}'
FILE, PURPOSE = ('name="file"; filename="rows.jsonl"', ROW), ('name="purpose"', b"batch")
ANCHOR, SECONDS = 'name="expires_after[anchor]"', 'name="expires_after[seconds]"'
FORMS: list[tuple[str, bytes]] = [
    (MULTIPART, b""),
    (MULTIPART, form()),
    (MULTIPART, form(FILE)),
    (MULTIPART, form(PURPOSE)),
    (MULTIPART, form(FILE, FILE, PURPOSE)),
    (MULTIPART, form(FILE, ('name="purpose"', b"\xff"))),
    (MULTIPART, form(FILE, ('name="purpose"', b"assistants_output"))),
    (MULTIPART, form(FILE, ('name="purpose"', b"x" * 5000))),
    (MULTIPART, form(FILE, PURPOSE, *[(f'name="{n}"', b"x") for n in range(40)])),
    (MULTIPART, form(FILE, PURPOSE, boundary="other")),
    (MULTIPART, form(FILE, PURPOSE, (ANCHOR, b"created_at"))),
    (MULTIPART, form(FILE, PURPOSE, (SECONDS, b"3600"))),
    (MULTIPART, form(FILE, PURPOSE, (ANCHOR, b"created_at"), (SECONDS, b"5"))),
    (MULTIPART, form(FILE, PURPOSE, (ANCHOR, b"x"), (SECONDS, b"3600"))),
    (MULTIPART, form(FILE, PURPOSE, (ANCHOR, b"created_at"), (SECONDS, "\u0663".encode() * 4))),
    (MULTIPART, form(FILE, PURPOSE).replace(b"\r\n\r\n", b"\r\n", 1)),
    (MULTIPART, form(FILE, PURPOSE).replace(b"content-disposition", b"content disposition")),
    ("multipart/form-data", form(FILE, PURPOSE)),
    (f"multipart/form-data; boundary={'x' * 300}", form(FILE, PURPOSE)),
    ("multipart/mixed; boundary=tide", form(FILE, PURPOSE)),
    ("application/json", b'{"purpose": "batch"}'),
    ("application/x-www-form-urlencoded", b"purpose=batch&file=x"),
    ("", form(FILE, PURPOSE)),
]


def malformed_form(chance: random.Random) -> tuple[str, bytes]:
    """Returns the content type and the body of an upload."""
    kind, whole = chance.choice(FORMS), form(FILE, PURPOSE)
    end = whole.rindex(b"--")
    return chance.choice([kind, (MULTIPART, whole[: chance.randrange(end)]), (MULTIPART, noise(chance, ""))])


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[ASGIApp]:
    """A gateway with one model, `m`, behind a socket."""

    async def no_problem() -> None:
        return None

    engine = FakeEngine()
    server = EngineServer(engine, await engine.start(), "secret", problem=no_problem)
    address = ReplicaAddress("127.0.0.1", await server.listen("127.0.0.1"), "secret")
    models = EndpointModels("one")
    models.update({"m": EndpointEntry(ServeSpec(name="m", model="/m"), time.time(), {"r": address})})

    async def run() -> AsyncIterator[None]:
        yield

    nobody = Tenancy(ControlApi("http://127.0.0.1:9", "", "one"), requires_keys=False)
    gateway = create_app(models, nobody, run)
    BatchService(gateway, models, nobody, tmp_path)
    yield gateway
    await models.close()
    await server.close()
    await engine.shutdown()


async def test_each_is_a_4xx_with_the_error_body(app: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, statuses = random.Random(SEED), Counter[int]()
    uploaded = await ask(app, "/v1/files", form(FILE, PURPOSE), content_type=MULTIPART)
    assert uploaded.status == 200, uploaded.body
    monkeypatch.setitem(VALID, "/v1/batches", BATCH | {"input_file_id": json.loads(uploaded.body)["id"]})
    for path, body in VALID.items():
        assert (await ask(app, path, json.dumps(body).encode())).status == 200
    for _ in range(COUNT):
        path, content_type = chance.choice([*VALID, "/v1/files"]), "application/json"
        if path == "/v1/files":
            content_type, raw = malformed_form(chance)
        else:
            kind = chance.choice([each for each in KINDS if "model" in VALID[path] or each is not wrong_model])
            raw = kind(chance, path)
        answer = await ask(app, path, raw, content_type=content_type)
        assert 400 <= answer.status < 500, (path, content_type, raw[:500], answer.body[:500])
        told = {"message", "type"} if path == "/v1/messages" else {"message", "type", "param", "code"}
        assert set(answer.error) - {"details"} == told, (path, raw[:500])
        assert answer.error["message"]
        statuses[answer.status] += 1
    assert 422 not in statuses
    assert sum(statuses.values()) == COUNT
    for path, body in VALID.items():
        assert (await ask(app, path, json.dumps(body).encode())).status == 200
    listed = json.loads((await ask(app, "/v1/batches", method="GET")).body)["data"]
    assert len(listed) == 2, "a malformed body has created a batch"
