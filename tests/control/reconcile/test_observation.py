from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from raytide.autoscaler.providers.base import Machine
from raytide.control.reconcile.observation import ApiProbe, observe
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.telemetry.targets import Target


def test_the_probe_raises_while_the_api_does_not_answer() -> None:
    codes = [200, 503, 200]
    probe = ApiProbe("http://127.0.9.1:7400")
    transport = httpx.MockTransport(lambda request: httpx.Response(codes.pop(0)))
    probe._http = httpx.Client(base_url="http://127.0.9.1:7400", transport=transport)
    assert probe.answers()
    with pytest.raises(httpx.HTTPStatusError):
        probe.answers()
    assert probe.answers()


def test_the_pages_of_agents_exporters_and_replicas_are_found() -> None:
    machines = (
        Machine("node-1", "gpu8", "a", 1, 0.0, meter="127.0.2.2:9400"),
        Machine("node-2", "gpu8", "a", 1, 0.0, 5.0, meter="127.0.2.3:9400"),  # it has ended
        Machine("node-3", "cpu", "a", 1, 0.0, ray_id="pod-3"),
    )
    load = EndpointLoad(0.0, 0.0, 2, pages={"r1": "127.0.2.2:7", "r2": ""})  # one of an older release has no page
    agents = {"head": "127.0.2.1:1", "node-1": "127.0.2.2:1", "pod-3": "127.0.2.4:1"}
    announced = {"node-3": "127.0.2.4:9400"}
    meters = SimpleNamespace(
        last_readings=dict,
        measured=dict,
        agents=lambda: agents,
        exporter_of=lambda machine: machine.meter or announced.get(machine.node_id, ""),
    )
    source: Any = SimpleNamespace(
        provider=SimpleNamespace(machines=lambda: machines, notices=tuple, prices=dict, problems=tuple),
        gcs=SimpleNamespace(nodes=tuple, demand=tuple),
        groups=SimpleNamespace(list=dict),
        serve=SimpleNamespace(loads=lambda names: {"chat": load}),
        meters=meters,
    )
    assert observe(source, endpoints=("chat",), with_drivers=False, with_gangs=False).targets == (
        Target("raytide-node", "127.0.2.1:1", labels={"node": "head"}),
        Target("raytide-node", "127.0.2.2:1", labels={"node": "node-1"}),
        Target("raytide-node", "127.0.2.4:1", labels={"node": "node-3"}),
        Target("raytide-gpu", "127.0.2.2:9400", labels={"node": "node-1"}),
        Target("raytide-gpu", "127.0.2.4:9400", labels={"node": "node-3"}),
        Target("raytide-replica", "127.0.2.2:7", labels={"endpoint": "chat", "replica": "r1"}),
    )
