"""Hostile requests over every route of the API: no 5xx, no answer that is not JSON, no growth of memory."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Iterator

import psutil
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import BaseRoute, Route
from tests.control.api.test_routes import GANG, LOCAL, SCRIPT, Echo
from tests.control.conftest import NoMachines
from tests.stores import new_store

from raytide.control.api.auth import Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.service import ApiService
from raytide.core.clock import VirtualClock
from raytide.core.objects.cluster_config import load_cluster
from raytide.dashboards.web import stream

EXAMPLES, MORE_EXAMPLES = 60, 200
MOST_GROWTH_BYTES = 50 * 2**20
TOKENS = {"secret": ("ana", "default"), "other": ("bob", "research"), "root": ("root", "*")}
CHANGES_NOTHING = ("GET", "HEAD", "OPTIONS", "TRACE", "BREW")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW")
TRAIN = {"kind": "train", "config": {"dataset": "/none", "out": "/none", "steps": 1}}
DATA = {"kind": "data", "config": {"inputs": ["/none"], "out": "/none"}}
ENDPOINT = {"name": "m", "model": "/none", "replicas": {"min": 1, "max": 2}}
NAMES = (
    *(
        "job-1",
        "job-2",
        "job-3",
        "m",
        "default",
        "unmanaged",
        "none",
        "a" * 64,
        "kind",
        "team",
        "day",
        "no such",
        "%00",
    ),
    *("%ed%a0%80", "%ff", "..", "%2e%2e%2f", "a%2fb", "%0a", "-", "job-" + "9" * 40, "x" * 3000, "%F0%9F%98%80", "*"),
)
NUMBERS = (
    *("nan", "inf", "-inf", "-1", "0", "1", "1e308", "1e309", "-1e308", "true", "9" * 30, "9" * 5000, str(2**63)),
    *("0x10", "1.5", "", " ", "\u0661", "null", "%00", "a", "job", "month", "1:1", "9:9", "0:" + "9" * 18),
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("fuzz")
    store = new_store(folder)
    desk = ApiService(
        store=store,
        config=load_cluster(LOCAL),
        bill=NoMachines(),
        drivers=Echo(),  # type: ignore[arg-type]
        clock=VirtualClock(1000.0),
        live=folder / "live.json",
        serve_url="",
        ray_url="",
        ray_environment={},
    )
    tokens = {token: {"user": user, "team": team} for token, (user, team) in TOKENS.items()}
    (folder / "tokens.json").write_text(json.dumps({**tokens, "gateway": {"role": "gateway"}}))
    (folder / "tokens.json").chmod(0o600)
    app = create_app(desk, Tokens(folder / "tokens.json"))
    with pytest.MonkeyPatch.context() as patch, TestClient(app, raise_server_exceptions=False) as client:
        patch.setattr(stream, "LONGEST_S", 0.01)
        for body in (GANG, SCRIPT, GANG):
            client.post("/v1/jobs", json=body, headers={"Authorization": "Bearer secret"})
        yield client
    store.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits of the API last no time."""
    monkeypatch.setattr("raytide.control.api.tenancy_routes._LONGEST_POLL_S", 0.0)
    monkeypatch.setattr("raytide.control.api.routes._LONGEST_POLL_S", 0.0)
    monkeypatch.setattr("raytide.control.api.services.service.request_snapshot", lambda folder: "{}")


def routes(client: TestClient) -> list[BaseRoute]:
    return [route for route in client.app.routes if isinstance(route, Route)]  # type: ignore[attr-defined]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**62, max_value=2**80),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["\ud800", "\0", "s3://b/x", "http://127.0.0.1:1/x", "::", "/dev/zero", "/proc/self/mem", "a" * 999]
    ),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
KEYS = (
    *("kind", "name", "team", "gang", "config", "priority", "labels", "deadline", "budget_usd", "max_restarts"),
    *("shapes", "members", "min_members", "resources", "model", "replicas", "engine", "quota", "borrow", "error"),
    *("dataset", "out", "steps", "inputs", "command", "package", "env", "step", "left_s", "estimate_h", "budget"),
)


@st.composite
def specs(draw: st.DrawFn) -> object:
    """A good spec in which some keys, at any depth, have another value."""
    spec = json.loads(json.dumps(draw(st.sampled_from([GANG, SCRIPT, {**GANG, **TRAIN}, {**GANG, **DATA}, ENDPOINT]))))
    for _ in range(draw(st.integers(0, 3))):
        place = spec
        for _ in range(draw(st.integers(0, 3))):
            inner = [each for each in place.values() if isinstance(each, dict)]
            inner += [one for each in place.values() if isinstance(each, list) for one in each if isinstance(one, dict)]
            if inner:
                place = draw(st.sampled_from(inner))
        place[draw(st.sampled_from([*KEYS, *place]))] = draw(VALUES)
    return spec


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON, JSON cut off, bytes, and what only hostile clients send."""
    whole = json.dumps(draw(st.one_of(specs(), specs(), VALUES, st.dictionaries(st.sampled_from(KEYS), VALUES))))
    text = whole.encode()
    cut = text[: draw(st.integers(0, len(text)))]
    deep = b'{"config":' * 3000 + b"1" + b"}" * 3000
    long = b'{"labels": {"a": "' + b"x" * draw(st.sampled_from([70_000, 2_000_000])) + b'"}}'
    many = b'{"command": [' + b"0," * 300_000 + b"0]}"
    return draw(st.sampled_from([text, text, text, text, cut, draw(st.binary(max_size=200)), deep, long, many, b""]))


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    token = draw(st.sampled_from([*TOKENS, "gateway", "", "wrong", "\xff" * 300]))
    query = draw(st.sampled_from(["limit", "offset", "key", "usd", "soft", "per", "after", "tail", "newer_than", "x"]))
    names = draw(st.lists(st.sampled_from(["timeout_s", "since_s", "until_s", "active", query]), max_size=3))
    values = st.sampled_from(NUMBERS) | st.text(st.characters(codec="utf-8"), max_size=200)
    length = draw(st.sampled_from([None, None, None, None, "-1", "9" * 30, "nonsense"]))
    return {
        "method": draw(st.sampled_from([*METHODS, "own", "own", "own", "own", "own", "own"])),
        "names": [draw(st.sampled_from(NAMES)) for _ in range(2)],
        "params": [(name, draw(values)) for name in names],
        "content": draw(bodies()),
        "headers": {"Authorization": f"Bearer {token}".encode("latin-1")}
        | ({"Content-Length": length} if length else {}),
    }


def send(client: TestClient, route: Route, request: dict[str, object]) -> None:
    names = iter(request["names"])  # type: ignore[call-overload]
    path = re.sub(r"\{[^}]*\}", lambda _: next(names), route.path)
    own = sorted(route.methods or {"GET"})[-1]
    method = own if request["method"] == "own" else str(request["method"])
    answer = client.request(
        method,
        path,
        params=request["params"],  # type: ignore[arg-type]
        content=request["content"],  # type: ignore[arg-type]
        headers=request["headers"],  # type: ignore[arg-type]
        follow_redirects=False,
    )
    where = f"{method} {path[:200]} {request}"
    assert answer.status_code < 500, f"{where}: {answer.status_code} {answer.text[:300]}"
    if answer.status_code >= 400 and method != "HEAD":
        assert answer.json()["error"]["message"], where
    if method in CHANGES_NOTHING:
        return
    headers = {"Authorization": request["headers"]["Authorization"]}  # type: ignore[index]
    assert client.get("/v1/jobs", params={"limit": 1000}, headers=headers).status_code in (200, 401, 403), where


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(MORE_EXAMPLES, marks=pytest.mark.soak)])
def test_no_request_to_any_route_breaks_the_api_or_grows_it(client: TestClient, examples: int) -> None:
    every = routes(client)
    assert {"/v1/jobs", "/v1/jobs/{job_id}/lease", "/health"} <= {route.path for route in every}  # type: ignore[attr-defined]
    process = psutil.Process(os.getpid())
    grown: list[int] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def fuzz(request: dict[str, object]) -> None:
        for route in every:
            send(client, route, request)  # type: ignore[arg-type]
        if len(grown) < 20:  # what is loaded and cached once
            gc.collect()
        if len(grown) < 20 or len(grown) % 50 == 0:
            grown.append(process.memory_info().rss)
        else:
            grown.append(grown[-1])

    fuzz()
    gc.collect()
    assert process.memory_info().rss - grown[19] < MOST_GROWTH_BYTES
    assert client.get("/health").json()["ok"] is True


def test_no_schema_of_the_api_is_shown(client: TestClient) -> None:
    for path in ("/openapi.json", "/docs", "/redoc", "/v1"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer root"}).status_code == 404
