"""A Ray that runs: whether others than its owner can have it do anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from raytide.control.bootstrap import exposure
from raytide.control.bootstrap.exposure import check_running
from raytide.core.errors import ClusterError
from raytide.core.io.environment import is_loopback

AWAY = "10.0.0.7:6379"


class Dashboard(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.mode: str | None = "token"


class Page(BaseHTTPRequestHandler):
    server: Dashboard

    def do_GET(self) -> None:
        assert self.path == "/api/authentication_mode"
        payload = json.dumps({"authentication_mode": self.server.mode} if self.server.mode else [1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with Dashboard() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url(of: Dashboard) -> str:
    return f"http://127.0.0.1:{of.server_port}"


def test_one_that_asks_for_its_token_and_shows_its_dashboard_to_its_machine_alone_is_closed(
    dashboard: Dashboard,
) -> None:
    check_running(AWAY, url(dashboard))


@pytest.mark.parametrize("mode", ["disabled", None])
def test_one_that_asks_nobody_or_does_not_say_is_refused(dashboard: Dashboard, mode: str | None) -> None:
    dashboard.mode = mode
    with pytest.raises(ClusterError, match="does not require a token") as refused:
        check_running(AWAY, url(dashboard))
    assert "--insecure" in refused.value.hint


def test_a_dashboard_that_others_reach_is_refused(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "is_loopback", lambda host: False)
    with pytest.raises(ClusterError, match=r"has its dashboard, which accepts any job, on 127\.0\.0\.1"):
        check_running(AWAY, url(dashboard))


def test_on_loopback_nothing_is_asked() -> None:
    check_running("127.0.9.1:6379", "http://127.0.9.1:1")


def test_what_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "localhost", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "$IP", "head", "", "127.0.0.1.example")))
