"""Replicas and gateways that are killed, hang, drain or lose their node under 64 streams: no stream is lost, and its
text and usage are the undisturbed ones. SOAK_SEED sets the seed, which is printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress

import httpx
import psutil
import pytest
from tests.cluster_fixture import kill_raylet, replica_pids
from tests.soak.gateway_bills import PRICE, Bills
from tests.soak.gateway_streams import Load, requests
from tests.soak.work import Corpus

import raytide as rt
from raytide.actors.trainer.runners.local import train_local
from raytide.autoscaler.providers.local.files import node_folders
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster
from raytide.control.client import ApiClient
from raytide.core.io.process import marked
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SEED = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(10_000))
STREAMS, TOKENS, REPLICAS = 64, 300, 3
SECONDS, PERIOD_S = 60.0, 5.0
ENGINE, GATEWAY = "raytide.actors.serving.engine_process", "raytide.gateway"

Say = Callable[[str], None]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local.temporary(tmp_path_factory.mktemp("home"), local.DEFAULT_CONFIG, "kills") as running:
        yield running


@pytest.fixture(scope="module")
def tide(up: LocalCluster) -> Iterator[rt.Client]:
    with rt.Client(ApiClient.from_run_dir(up.run_dir)) as connected:
        yield connected


@pytest.fixture(scope="module")
def spec(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> ServeSpec:
    """`deterministic` makes an answer independent of what else is in the batch, and so of where it goes on."""
    out = str(tmp_path_factory.mktemp("model"))
    shape = ModelSpec(dim=64, layers=2, heads=4, max_seq_len=1024)
    result = train_local(
        TrainSpec(dataset=corpus.dataset, out=out, model=shape, steps=20, global_batch=4, micro_batch=4, seq_len=64)
    )
    return ServeSpec(
        name="tiny",
        model=str(result.model_dir),
        replicas=Replicas(min=REPLICAS, max=REPLICAS),
        resources={"CPU": 1},
        engine={"deterministic": True},
        price=PRICE,
    )


@pytest.fixture
def endpoint(tide: rt.Client, spec: ServeSpec) -> rt.EndpointHandle:
    """The endpoint of all tests, with all its replicas ready."""
    return tide.serve(spec).wait(replicas=REPLICAS, timeout_s=240.0)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids(of: LocalCluster, module: str) -> list[int]:
    """The cluster's processes that run this module."""
    found = []
    for process in marked(MARK, of.cluster_id):
        try:
            command = psutil.Process(process.pid).cmdline()
        except psutil.Error:  # it ended
            continue
        if module in command:
            found.append(process.pid)
    return sorted(found)


def engine_pids(of: LocalCluster) -> list[int]:
    return pids(of, ENGINE)


def node_of(of: LocalCluster, pid: int) -> str:
    """The id of the node whose process started this one."""
    above = {parent.pid for parent in psutil.Process(pid).parents()}
    nodes = ((folder.node_id, folder.process()) for folder in node_folders(of.run_dir))
    return next(node_id for node_id, process in nodes if process is not None and process.pid in above)


def run(load: Load, disturb: Callable[[], Awaitable[None]]) -> None:
    """Runs the streams beside a disturbance until it is over and they have ended."""

    async def both() -> None:
        await load.learn()
        load.start()
        try:
            await disturb()
        finally:
            await load.finish()

    asyncio.run(both())


@pytest.fixture(scope="module")
def bills(up: LocalCluster) -> Iterator[Bills]:
    with closing(ApiClient.from_run_dir(up.run_dir)) as api:
        yield Bills(api, up.serve_url)


def load_of(endpoint: rt.EndpointHandle, bills: Bills | None = None) -> Load:
    load = Load(endpoint.base_url + "/", requests("tiny", STREAMS, TOKENS), bills.secrets if bills else ())
    if bills:
        bills.loads.append(load)
    return load


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_replicas_killed_every_five_seconds_change_no_stream(
    up: LocalCluster, endpoint: rt.EndpointHandle, bills: Bills, say: Say
) -> None:
    """And nothing is billed twice."""
    say(f"\nseed {SEED} (SOAK_SEED)")
    load, chance, killed = load_of(endpoint, bills), random.Random(SEED), {"replica": 0, "engine": 0}

    async def disturb() -> None:
        until_s = asyncio.get_running_loop().time() + SECONDS
        while asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(PERIOD_S)
            what = chance.choice(("replica", "engine"))
            find = replica_pids if what == "replica" else engine_pids
            candidates = await asyncio.to_thread(find, up)
            if candidates:
                kill(chance.choice(sorted(candidates)))
                killed[what] += 1

    run(load, disturb)
    say(f"{killed} killed, {load.completed} streams complete, {len(load.broken)} broken, {len(load.differing)} differ")
    assert [str(error) for error in load.broken] == []
    assert load.differing == []
    assert load.completed >= STREAMS
    assert sum(killed.values()) >= 5
    bills.check()


def test_a_killed_gateway_breaks_its_own_connections_only(
    up: LocalCluster, endpoint: rt.EndpointHandle, bills: Bills
) -> None:
    """The other one answers on the same port at once, and the supervisor starts it again. What the killed one had
    answered is billed, once.
    """
    load, before = load_of(endpoint, bills), pids(up, GATEWAY)
    killed_at_s, on_the_other = 0.0, set[int]()

    async def disturb() -> None:
        nonlocal killed_at_s
        await asyncio.sleep(2.0)
        victim, other = before
        connections = await asyncio.to_thread(psutil.Process(other).net_connections, "tcp")
        on_the_other.update(each.raddr.port for each in connections if each.raddr)
        dying = psutil.Process(victim)
        kill(victim)
        # Until the kernel has closed its sockets, it still gets some of the new connections.
        await load.until("the gateway to be gone", lambda: not is_alive(dying))
        killed_at_s = time.monotonic()
        for _ in range(50):
            response = await asyncio.to_thread(lambda: httpx.get(endpoint.base_url + "/models", timeout=30))
            assert response.status_code == 200
        await load.until("the gateway to be back", lambda: len(pids(up, GATEWAY)) == len(before))
        await asyncio.sleep(2.0)

    run(load, disturb)
    assert len(before) == 2
    assert load.broken
    assert [str(error) for error in load.broken if error.port in on_the_other or error.began_s > killed_at_s] == []
    assert load.differing == []
    assert load.completed >= STREAMS
    bills.check()


def test_streams_of_a_hung_engine_go_on_elsewhere(up: LocalCluster, endpoint: rt.EndpointHandle) -> None:
    load = load_of(endpoint)

    async def disturb() -> None:
        await asyncio.sleep(2.0)
        hung = engine_pids(up)[0]
        os.kill(hung, signal.SIGSTOP)
        try:
            completed = load.completed
            await load.until("streams to go on", lambda: load.completed >= completed + 2 * STREAMS)
        finally:
            kill(hung)

    run(load, disturb)
    assert [str(error) for error in load.broken] == []
    assert load.differing == []


def test_scaling_down_and_up_loses_no_stream(
    tide: rt.Client, spec: ServeSpec, endpoint: rt.EndpointHandle, up: LocalCluster
) -> None:
    load = load_of(endpoint)

    async def disturb() -> None:
        await asyncio.sleep(2.0)
        for count in (1, REPLICAS):
            wanted = spec.model_copy(update={"replicas": Replicas(min=count, max=count)})
            await asyncio.to_thread(lambda wanted=wanted: tide.serve(wanted))
            await load.until(f"{count} replicas", lambda count=count: len(engine_pids(up)) == count)
            completed = load.completed
            await load.until("streams", lambda completed=completed: load.completed >= completed + STREAMS)

    run(load, disturb)
    assert [str(error) for error in load.broken] == []
    assert load.differing == []


def test_a_lost_node_loses_no_stream(up: LocalCluster, endpoint: rt.EndpointHandle) -> None:
    load = load_of(endpoint)

    async def disturb() -> None:
        await asyncio.sleep(2.0)
        engines = engine_pids(up)
        await asyncio.to_thread(kill_raylet, up, node_of(up, engines[0]))  # another may have no replica
        await load.until("its replicas to end", lambda: set(engines) - set(engine_pids(up)))
        await load.until("replacements", lambda: len(engine_pids(up)) == REPLICAS, timeout_s=240.0)

    run(load, disturb)
    assert [str(error) for error in load.broken] == []
    assert load.differing == []
