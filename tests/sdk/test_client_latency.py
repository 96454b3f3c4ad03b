"""The SDK's OpenAI client measures what it sees, and reports it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import openai
import pytest

from raytide.core.errors import ClusterError
from raytide.sdk.serving import client_latency
from raytide.sdk.serving.client_latency import LatencyReporter

FIRST_S, LAST_S = 0.15, 0.1


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"])).decode()
        if "refuse" in asked:
            self.send_error(400)
            return
        is_streamed = '"stream":true' in asked
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if is_streamed else "application/json")
        self.end_headers()
        time.sleep(FIRST_S)
        if is_streamed:
            self.wfile.write(b'data: {"id": "1", "object": "text_completion", "choices": []}\n\n')
            self.wfile.flush()
            time.sleep(LAST_S)
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self.wfile.write(b'{"id": "1", "object": "text_completion", "choices": []}')

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def model(url: str, reporter: LatencyReporter) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=reporter.http_client(url))


def test_first_tokens_and_whole_requests_are_measured_and_refusals_are_not(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_latency, "REPORT_S", 3600.0)  # of its own it reports nothing meanwhile
    sent: list[dict[str, Any]] = []
    chat = model(url, reporter := LatencyReporter(sent.append))
    for _ in chat.completions.create(model="m", prompt="x", stream=True):
        pass
    chat.completions.create(model="m", prompt="x")
    with pytest.raises(openai.BadRequestError):
        chat.completions.create(model="m", prompt="refuse")
    reporter.flush()
    reporter.flush()
    (body,) = sent
    assert (sum(body["requests"]), sum(body["first_tokens"])) == (2, 1)
    assert body["first_tokens_s"] >= FIRST_S
    assert body["requests_s"] >= 2 * FIRST_S + LAST_S


def test_reports_are_rare_and_one_that_fails_disturbs_nobody(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_latency, "REPORT_S", 0.0)
    sent: list[dict[str, Any]] = []

    def fail(body: dict[str, Any]) -> None:
        sent.append(body)
        raise ClusterError("the API is away")

    model(url, LatencyReporter(fail)).completions.create(model="m", prompt="x")
    until_s = time.monotonic() + 60.0
    while not sent and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(sent) == 1
