"""Ray Serve's router and proxy as they are: why a broken replica must end itself, and what slow readers cost."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from raytide.actors.serving.ray_serve.control import ServeControl
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec

pytestmark = pytest.mark.cluster

HEAD = "127.0.63.1"
STREAMS, TOKENS = 8, 4000
SLACK_BYTES = 32 << 20


def until(what: str, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def control() -> Iterator[ServeControl]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray
        from ray.cluster_utils import Cluster

        with socket.socket() as free:
            free.bind((HEAD, 0))
            port: int = free.getsockname()[1]
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=2, node_ip_address=HEAD, include_dashboard=False, object_store_memory=80 << 20)
            ray.init(address=cluster.address, log_to_driver=False)
            control = ServeControl(HEAD, port)
            control.start()
            yield control
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_the_router_prefers_a_replica_that_fails_at_once(control: ServeControl, tmp_path: Path) -> None:
    """Of two replicas one fails without work, so it is always idle: power of two choices gives it most requests, where
    a fair router would give it half. Therefore a replica whose engine died ends itself. If this fails, Serve's router
    has learnt to avoid such replicas.
    """
    from ray import serve

    class Half:
        def __init__(self, folder: str) -> None:
            from pathlib import Path

            try:
                (Path(folder) / "zombie").mkdir()
                self.is_zombie = True
            except FileExistsError:
                self.is_zombie = False

        async def __call__(self) -> str:
            import asyncio

            if not self.is_zombie:
                await asyncio.sleep(0.5)
            return "zombie" if self.is_zombie else "sound"

    options: dict[str, Any] = {"num_replicas": 2, "max_ongoing_requests": 64, "ray_actor_options": {"num_cpus": 0}}
    deployed: Any = serve.deployment(Half, name="half", **options)
    handle: Any = serve.run(deployed.bind(str(tmp_path)), name="half", route_prefix=None)

    def ask(_: int) -> str:
        return str(handle.remote().result(timeout_s=60.0))

    try:
        with ThreadPoolExecutor(16) as pool:
            answers = Counter(pool.map(ask, range(400)))
    finally:
        serve.delete("half")
    assert answers["sound"] > 0
    assert answers["zombie"] > 0.7 * answers.total()


def proxy_process() -> psutil.Process:
    (found,) = (
        each
        for each in psutil.Process().children(recursive=True)
        if each.name().startswith("ray::ProxyActor") or "ray::ProxyActor" in " ".join(each.cmdline())
    )
    return found


def test_readers_that_stop_reading_cost_the_proxy_their_answers_until_they_are_given_up(control: ServeControl) -> None:
    """The proxy takes a stream from its replica whether or not its client reads, so answers wait in the proxy. The
    limits on answers bound what one client costs, and the edge's timeout how long.
    """
    engine = {"kind": "fake", "max_model_len": 8192, "max_running": 8 * STREAMS}
    spec = ServeSpec(name="m", model="unused", replicas=Replicas(min=1, max=1), max_ongoing=2 * STREAMS, engine=engine)
    served = Endpoint(spec=spec, user="me", state=EndpointState.DEPLOYING, created_at_s=0.0, target_replicas=1)
    control.deploy(served, is_there=False)
    until("a replica", lambda: (load := control.loads(["m"]).get("m")) is not None and load.ready == 1)
    url = f"http://{control._http_host}:{control._http_port}/m/v1/completions"
    ask = {"model": "m", "prompt": "x", "max_tokens": TOKENS, "logprobs": 5, "n": 8, "stream": True}
    whole = len(httpx.post(url, json=ask, timeout=120.0).content)
    proxy = proxy_process()
    body = json.dumps(ask).encode()
    head = (
        f"POST /m/v1/completions HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    before = proxy.memory_info().rss
    readers = []
    try:
        for _ in range(STREAMS):
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((control._http_host, control._http_port))
            reader.sendall(head.encode() + b"\r\n\r\n" + body)
            assert reader.recv(1)
            readers.append(reader)
        most, deadline = 0, time.monotonic() + 120.0
        while control.loads(["m"])["m"].ongoing:
            assert time.monotonic() < deadline, "they are never given up"
            most = max(most, proxy.memory_info().rss - before)
            time.sleep(0.1)
        assert most < 1.5 * STREAMS * whole + SLACK_BYTES
    finally:
        for reader in readers:
            reader.close()
