"""Endpoints on a real Ray: the head has no CPU, one node has three."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import pytest
from openai import OpenAI
from tests.ray_fixture import patient_starts

from raytide.actors.serving.ray_serve.control import ServeControl
from raytide.core.errors import RaytideError
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad

pytestmark = pytest.mark.cluster

K = 100 + os.getpid() % 50  # hardly that of another checkout's suite
HEAD, NODE = f"127.0.{K}.1", f"127.0.{K}.2"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOKENS = 400
"""At 100 tokens per second a stream lasts four seconds: a kill hits it in the middle."""

GATEWAY = f"http://{HEAD}:8061"
GATEWAY_SCRIPT = f"""
import tempfile
from pathlib import Path
from raytide.gateway.__main__ import bound_socket, serve
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.tenancy import Tenancy
nobody = Tenancy(ControlApi("http://{HEAD}:9", "", "one"), requires_keys=False)
with tempfile.TemporaryDirectory() as folder:
    serve("{{gcs}}", bound_socket("{HEAD}", 8061), "one", nobody, Path(folder))
"""

DEPLOY_AND_DIE = """
import os, pickle, signal, sys
import ray
address, endpoint = sys.argv[1], pickle.loads(bytes.fromhex(sys.argv[2]))
ray.init(address=address, log_to_driver=False)
from raytide.actors.serving.ray_serve.control import ServeControl
control = ServeControl()
control.start()
control.deploy(endpoint, is_there=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def endpoint(name: str, **engine: object) -> Endpoint:
    spec = ServeSpec(
        name=name,
        model="unused",
        replicas=Replicas(min=1, max=2),
        labels={"tide": "high"},
        engine={"kind": "fake", "tokens_per_s": 100.0, **engine},
    )
    return Endpoint(spec=spec, user="me", state=EndpointState.DEPLOYING, created_at_s=0.0, target_replicas=1)


def until(what: str, holds: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def control() -> Iterator[ServeControl]:
    """A controller on a fresh cluster, where an earlier controller deployed endpoint `m` and was killed."""
    own = {"RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PIP_NO_INDEX": "1"}
    with patch.dict(os.environ, own):
        import pickle

        import ray
        from ray.cluster_utils import Cluster

        store = {"object_store_memory": 80 << 20}
        cluster = Cluster()
        try:
            with patient_starts():
                cluster.add_node(num_cpus=0, node_ip_address=HEAD, include_dashboard=False, **store)
                cluster.add_node(num_cpus=3, node_ip_address=NODE, labels={"tide": "high"}, **store)
            command = [sys.executable, "-c", DEPLOY_AND_DIE, cluster.address, pickle.dumps(endpoint("m")).hex()]
            died = subprocess.run(command, timeout=240, capture_output=True, check=False)
            assert died.returncode == -signal.SIGKILL, died.stderr.decode()
            ray.init(address=cluster.address, log_to_driver=False)
            yield ServeControl(look_timeout_s=60.0)
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module", autouse=True)
def gateway(control: ServeControl) -> Iterator[None]:
    """A gateway process at GATEWAY."""
    import ray

    script = GATEWAY_SCRIPT.format(gcs=ray.get_runtime_context().gcs_address)
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        until("the gateway", _answers)
        yield
    finally:
        process.terminate()
        process.wait(120)


def _answers() -> bool:
    try:
        return httpx.get(f"{GATEWAY}/m/v1/models", timeout=60.0).is_success
    except httpx.TransportError:
        return False


def load_of(control: ServeControl, name: str = "m") -> EndpointLoad:
    return control.loads([name]).get(name) or EndpointLoad(at_s=0.0, ongoing=0.0, ready=0)


def base_url(control: ServeControl, name: str) -> str:
    return f"{GATEWAY}/{name}/v1"


def client_of(control: ServeControl, **options: Any) -> OpenAI:
    return OpenAI(base_url=base_url(control, "m"), api_key="none", timeout=120, max_retries=0, **options)


def scale(control: ServeControl, replicas: int) -> None:
    control.publish("m", replicas)
    until(f"{replicas} ready replicas", lambda: load_of(control).ready == replicas)


def ask_serve(method: str) -> Any:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    serve = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    return ray.get(getattr(serve, method).remote(), timeout=120)


def replica_actors() -> set[str]:
    from ray.util import list_named_actors

    return {str(actor["name"]).removeprefix("SERVE_REPLICA::") for actor in list_named_actors(all_namespaces=True)}


def pids(control: ServeControl) -> dict[str, int]:
    """Returns the process of each running replica, by the name it gives itself in `x-raytide-replica`."""
    replicas = ask_serve("get_serve_instance_details")["applications"]["m"]["deployments"]["replica"]["replicas"]
    return {replica["replica_id"]: replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}


def test_an_endpoint_outlives_the_controller_that_deployed_it(control: ServeControl) -> None:
    until("the replica", lambda: load_of(control).ready == 1)
    assert control.applications().keys() == {"m"}
    answer = client_of(control, _strict_response_validation=True).chat.completions.with_raw_response.create(
        model="m", messages=HELLO, max_tokens=5, extra_headers={"x-request-id": "mine"}
    )
    assert answer.parse().choices[0].message.content == "tide "
    assert answer.headers["x-raytide-replica"] in pids(control)
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_the_start_of_a_replica_is_shown_phase_by_phase(control: ServeControl) -> None:
    until("the replica to be shown", lambda: len(load_of(control).startups) == 1)
    (startup,) = load_of(control).startups
    assert [name for name, _ in startup.phases] == ["node", "process", "stage", "load"]
    assert startup.is_ready
    assert startup.id in pids(control)


def test_deploying_the_same_endpoint_again_changes_nothing(control: ServeControl) -> None:
    before = pids(control)
    control.start()
    assert not control.deploy(endpoint("m"), is_there=True)
    assert pids(control) == before


def test_adapters_change_without_new_replicas_and_new_ones_have_them(control: ServeControl) -> None:
    before, plain = pids(control), endpoint("m")
    adapted = replace(plain, spec=plain.spec.model_copy(update={"adapters": {"one": "/adapters/one"}}))
    assert not control.deploy(adapted, is_there=True)

    def models() -> list[str]:
        return [model.id for model in client_of(control).models.list()]

    until("the adapter", lambda: [dict(each.adapters) for each in load_of(control).live] == [{"one": ""}])
    until("the gateway to list it", lambda: models() == ["m", "m:one"])
    ask = {"messages": HELLO, "max_tokens": 5}
    assert client_of(control).chat.completions.create(model="m:one", **ask).choices[0].message.content == "tide "
    assert pids(control) == before
    scale(control, 2)
    until("both to have it", lambda: [dict(each.adapters) for each in load_of(control).live] == [{"one": ""}] * 2)
    scale(control, 1)
    assert not control.deploy(plain, is_there=True)
    until("it to be gone", lambda: models() == ["m"])
    until("one replica", lambda: len(load_of(control).replica_nodes) == 1)


def test_weights_are_swapped_on_all_replicas_while_a_stream_runs(control: ServeControl) -> None:
    scale(control, 2)
    before, plain = pids(control), endpoint("m")
    stream = client_of(control).completions.create(model="m", prompt="go", max_tokens=TOKENS, stream=True)
    tokens = iter(stream)
    next(tokens)
    swapped = replace(plain, spec=plain.spec.model_copy(update={"weights": "/weights/new"}))
    assert not control.deploy(swapped, is_there=True)
    until("both to serve them", lambda: [each.weights for each in load_of(control).live] == ["/weights/new"] * 2)
    assert sum(1 for _ in tokens) > TOKENS // 2
    assert pids(control) == before
    assert not control.deploy(plain, is_there=True)
    until("both to serve the model's", lambda: [each.weights for each in load_of(control).live] == [""] * 2)
    scale(control, 1)
    until("one replica", lambda: len(load_of(control).replica_nodes) == 1)


def test_an_unknown_path_gets_an_openai_error(control: ServeControl) -> None:
    answer = httpx.get(base_url(control, "nobody") + "/models", timeout=60.0)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_the_published_number_is_the_number_of_replicas(control: ServeControl) -> None:
    scale(control, 2)
    until("both on the one node", lambda: [len(set(nodes := load_of(control).replica_nodes)), len(nodes)] == [1, 2])
    scale(control, 1)
    until("the second replica to be gone", lambda: len(load_of(control).replica_nodes) == 1)


def test_the_load_counts_what_is_answered_now(control: ServeControl) -> None:
    seen = threading.Event()

    def ask() -> None:  # again and again: the first may go to a replica that is on its way out
        while not seen.is_set():
            client_of(control).chat.completions.create(model="m", messages=HELLO, max_tokens=TOKENS)

    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask) for _ in range(6)]
        try:
            until("a load of 6", lambda: load_of(control).ongoing > 5.5)
        finally:
            seen.set()
        assert abs(load_of(control).at_s - time.time()) < 30
        for future in asking:
            future.result()
    until("a load of 0", lambda: load_of(control).ongoing < 0.5)


def test_replicas_speak_for_themselves_and_one_that_hangs_falls_silent(control: ServeControl) -> None:
    scale(control, 2)
    until("both to speak", lambda: len(load_of(control).replicas) == 2)
    stream = client_of(control).chat.completions.create(model="m", messages=HELLO, max_tokens=4000, stream=True)
    next(iter(stream))

    def said() -> dict[str, ReplicaLoad]:
        return {replica.id: replica for replica in load_of(control).replicas}

    answering: list[ReplicaLoad] = []

    def one_answers() -> bool:
        answering[:] = [replica for replica in said().values() if replica.running]
        return [replica.running for replica in answering] == [1]

    until("the one that answers to say so", one_answers)
    (busy,) = answering
    assert busy.kv_use == 1 / 64
    until("its counters", lambda: said()[busy.id].counters.output_tokens > busy.counters.output_tokens)
    assert said()[busy.id].counters.first_tokens >= 1
    (pid,) = (child.pid for child in psutil.Process(pids(control)[busy.id]).children())
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped_at_s = time.time()
        until("the other to have spoken", lambda: max(r.at_s for r in said().values()) > stopped_at_s + 1.5)
        last_s = said()[busy.id].at_s  # what it had said before may have arrived late
        until("the other to have spoken again", lambda: max(r.at_s for r in said().values()) > stopped_at_s + 3.0)
        assert said()[busy.id].at_s < last_s + 0.5, "the same report: its time is known to some microseconds"
        assert load_of(control).ongoing >= 1, "what it answers is not forgotten"
    finally:
        os.kill(pid, signal.SIGCONT)
        stream.close()


def test_streams_go_on_and_new_requests_succeed_when_a_replica_is_killed(control: ServeControl) -> None:
    scale(control, 2)
    began = []

    def stream() -> str:
        text = ""
        for chunk in client_of(control).chat.completions.create(
            model="m", messages=HELLO, max_tokens=TOKENS, stream=True
        ):
            began.append(1)
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return text

    with ThreadPoolExecutor(32) as pool:
        streams = [pool.submit(stream) for _ in range(32)]
        until("tokens", lambda: len(began) > 64)
        replica, pid = next(iter(pids(control).items()))
        engine = psutil.Process(pid).children()  # it ends with its parent, a little later
        os.kill(pid, signal.SIGKILL)
        assert psutil.wait_procs(engine, timeout=60.0)[1] == []
        fresh = client_of(control)
        for _ in range(8):
            answer = fresh.completions.with_raw_response.create(model="m", prompt="hello", max_tokens=1)
            assert answer.headers["x-raytide-replica"] != replica
        ends = [future.result(timeout=180) for future in streams]
    assert set(ends) == {"tide " * (TOKENS // 5)}
    until("the replica to be replaced", lambda: len(set(pids(control)) - {replica}) == 2)


def test_a_client_that_leaves_frees_its_place_behind_the_gateway(control: ServeControl) -> None:
    scale(control, 1)
    stream = client_of(control).chat.completions.create(model="m", messages=HELLO, max_tokens=4000, stream=True)
    next(iter(stream))
    stream.close()
    metrics = f"{base_url(control, 'm').removesuffix('/v1')}/metrics"
    until(
        "the place to be free",
        lambda: (
            'raytide_requests_running{endpoint="m",replica="",revision=""} 0.0' in httpx.get(metrics, timeout=60.0).text
        ),
    )


def test_an_endpoint_that_cannot_start_says_why(control: ServeControl) -> None:
    assert control.deploy(endpoint("broken", nonsense=1), is_there=False)
    until("the failure", lambda: control.applications()["broken"].failure != "")
    assert "nonsense" in control.applications()["broken"].failure
    assert control.applications()["m"].failure == ""
    control.delete("broken", is_there=True)


def test_packages_that_can_never_be_installed_are_named_until_the_spec_changes(control: ServeControl) -> None:
    lacks = endpoint("lacks")
    lacks = replace(lacks, spec=lacks.spec.model_copy(update={"pip": ("raytide-lacks==1",)}))
    assert control.deploy(lacks, is_there=False)
    until("the failure", lambda: control.applications()["lacks"].failure != "")
    failed = load_of(control, "lacks").install
    assert failed is not None and failed.is_final
    assert "the packages raytide-lacks==1 cannot be installed" in failed.why
    assert failed.why in control.applications()["lacks"].failure
    assert control.deploy(endpoint("lacks"), is_there=True)
    until("a replica without packages", lambda: load_of(control, "lacks").ready == 1)
    assert load_of(control, "lacks").install is None
    control.delete("lacks", is_there=True)


def test_an_endpoint_of_a_hosted_api_has_no_replicas(control: ServeControl) -> None:
    backend = {"base_url": "https://api.example/v1", "model": "big"}
    spec = ServeSpec.parse({"name": "far", "backend": backend}, where="test")
    hosted = Endpoint(spec=spec, user="me", state=EndpointState.DEPLOYING, created_at_s=0.0, target_replicas=0)
    control.deploy(hosted, is_there=False)
    until("a report on it", lambda: control.loads(["far"]).get("far") is not None)

    def refusal() -> str:
        body = {"model": "far", "messages": HELLO}
        answer = httpx.post(base_url(control, "far") + "/chat/completions", json=body, timeout=60.0)
        return str(answer.json()["error"]["code"])

    until("the gateway to know it", lambda: refusal() == "hosted_api")
    load = load_of(control, "far")
    assert (load.ready, load.replica_nodes, control.applications()["far"].failure) == (0, (), "")
    control.delete("far", is_there=True)


def test_a_replica_that_waits_for_a_node_is_on_none(control: ServeControl) -> None:
    waiting = endpoint("waiting")
    waiting = replace(waiting, spec=waiting.spec.model_copy(update={"labels": {"tide": "none"}}))
    assert control.deploy(waiting, is_there=False)
    until("the replica's actor", lambda: "waiting" in {name.split("#")[0] for name in replica_actors()})
    assert control.applications()["waiting"].replica_nodes == ()
    assert control.loads(["waiting"])["waiting"].ready == 0
    control.delete("waiting", is_there=True)


def test_a_look_at_a_serve_that_hangs_is_over_in_time(control: ServeControl) -> None:
    pid = ask_serve("get_pid")
    hasty = ServeControl(look_timeout_s=0.5)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RaytideError):
            hasty.loads(["m", "broken", "nobody"])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert control.loads(["m", "nobody"]).keys() == {"m"}


def test_a_deleted_endpoint_is_gone(control: ServeControl) -> None:
    control.delete("m", is_there=True)
    control.delete("m", is_there=True)
    until("the endpoint to be gone", lambda: "m" not in control.applications())
    control.delete("m", is_there=False)
    assert control.loads(["m"]) == {}
    models = base_url(control, "m") + "/models"
    until("the route to be gone", lambda: httpx.get(models, timeout=60.0).status_code == 404)
