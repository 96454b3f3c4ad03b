"""An endpoint of a local cluster is asked without a proxy, whatever the environment names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from raytide.actors.quality.scorers import EndpointScorer
from raytide.sdk.serving.endpoint import EndpointHandle
from raytide.workflows.stages import evaluation

ANSWER = {"object": "list", "data": [{"id": "chat"}], "choices": [{"text": "yes", "index": 0}], "revision": 3}


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())

    do_POST = do_GET


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The base URL of an endpoint that answers, on a machine with a proxy that does not."""
    for name in ("http_proxy", "https_proxy", "ALL_PROXY", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # the usual one, which local clusters are not in
    with HTTPServer(("127.0.9.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.9.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def handle(url: str) -> EndpointHandle:
    status: Any = SimpleNamespace(base_url=url, endpoint=SimpleNamespace(name="chat"))
    return EndpointHandle(SimpleNamespace(call=lambda *_: None), status)  # type: ignore[arg-type]


def ask(url: str) -> object:
    with handle(url).openai(max_retries=0) as client:
        return client.completions.create(model="chat", prompt="?").choices[0].text


def ask_as_a_stage(url: str) -> object:
    spec: Any = SimpleNamespace(endpoint=url, endpoint_model="chat", max_tokens=1, api_key_file=None)
    return evaluation._endpoint(spec)("?")


@pytest.mark.parametrize(
    ("use", "answer"),
    [
        (ask, "yes"),
        (ask_as_a_stage, "yes"),
        (lambda url: handle(url).feedback("id", "up"), 3),
        (lambda url: EndpointScorer(url, "")._model, "chat"),
    ],
    ids=["openai", "evaluation", "feedback", "scorer"],
)
def test_a_local_endpoint_is_asked_without_a_proxy(url: str, use: Callable[[str], object], answer: object) -> None:
    assert use(url) == answer
