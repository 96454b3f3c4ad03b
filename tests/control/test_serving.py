"""What raytide makes of Serve's words: only what Serve gave up for the model's own fault has failed."""

from __future__ import annotations

import pytest

from raytide.control.serving import Served, Serving
from raytide.core.endpoint import Endpoint, EndpointState, ServeSpec

ENDPOINT = Endpoint(ServeSpec(name="m", model="/models/m"), "ana", EndpointState.DEPLOYING, 0.0, target_replicas=1)


class Serve:
    """Serve as its control sees it, with what it says of failures."""

    def __init__(self) -> None:
        self.starts = 0
        self.deployed: list[str] = []
        self.live: set[str] = set()
        self.says = ""

    def start(self) -> None:
        self.starts += 1

    def deploy(self, endpoint: Endpoint) -> None:
        if endpoint.name not in self.live:
            self.deployed.append(endpoint.name)
            self.live.add(endpoint.name)

    def publish(self, name: str, target: int) -> None: ...

    def failure(self, name: str) -> str:
        return self.says

    def delete(self, name: str) -> None:
        self.live.discard(name)
        self.says = ""

    def names(self) -> frozenset[str]:
        return frozenset(self.live)


def passes(serving: Serving, count: int) -> Served:
    for _ in range(count):
        serving.match([ENDPOINT])
        assert serving._pass is not None
        serving._pass.result(timeout=10)
    serving.match([ENDPOINT])
    assert serving.served is not None
    return serving.served


@pytest.fixture
def serve() -> Serve:
    return Serve()


def test_serve_is_started_once_and_not_at_every_pass(serve: Serve) -> None:
    passes(Serving(serve), 5)  # type: ignore[arg-type]
    assert serve.starts == 1


def test_a_model_that_cannot_start_has_failed(serve: Serve) -> None:
    serve.says = "ValueError: no such option"
    assert passes(Serving(serve), 2).failures == (("m", "ValueError: no such option"),)  # type: ignore[arg-type]
    assert serve.deployed == ["m"]


def test_an_endpoint_whose_nodes_died_under_its_first_replicas_is_deployed_anew(serve: Serve) -> None:
    serve.says = "failed to start 3 times. The actor died because its node has died. Node Id: 00ff"
    assert passes(Serving(serve), 3).failures == ()  # type: ignore[arg-type]
    assert serve.deployed == ["m", "m"]
