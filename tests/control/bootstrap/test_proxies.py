"""A cluster's programs ask its own addresses without a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from raytide.control.bootstrap.control_plane import wait_for_api
from raytide.control.bootstrap.ray_head import wait_for_head
from raytide.control.reconcile.observation import ApiProbe


class Head:
    """A head that runs when it is first looked at, and has ended the next time."""

    looks = 0

    @property
    def alive(self) -> bool:
        self.looks += 1
        return self.looks == 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster whose addresses all answer, on a machine with a proxy that does not."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": {"result": {"result": ["node"]}}}')

    for name in ("NO_PROXY", "no_proxy", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"127.0.0.1:{server.server_port}"
        addresses = {"gcs_address": address, "agent_address": address, "dashboard_url": f"http://{address}"}
        log = SimpleNamespace(read_text=lambda **_: "")
        yield SimpleNamespace(
            **addresses,
            name="tide",
            api_url=f"http://{address}",
            ray_headers={"Authorization": "Bearer t"},
            log=lambda _: log,
            is_alive=lambda _: False,
        )
        server.shutdown()
        thread.join()


def test_a_new_ray_head_is_asked_without_a_proxy(cluster: Any) -> None:
    wait_for_head(cluster, Head(), timeout_s=120.0)  # type: ignore[arg-type]


def test_a_new_api_is_asked_without_a_proxy(cluster: Any) -> None:
    wait_for_api(cluster, timeout_s=120.0)


def test_the_controller_asks_the_api_without_a_proxy(cluster: Any) -> None:
    probe = ApiProbe(cluster.api_url)
    probe._http.timeout = 120.0  # a tick waits for a second, and this machine may be busy for longer
    assert probe.answers()
