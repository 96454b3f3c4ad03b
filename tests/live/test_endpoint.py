"""A served model on the session's cluster: two replicas under 32 streams, one of them killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from tests.cluster_fixture import replica_pids, settled_replica_pids

import raytide as rt
from raytide.actors.trainer.runners.local import train_local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec

pytestmark = pytest.mark.cluster

STREAMS = 32
TOKENS = 400


@dataclass(frozen=True)
class End:
    how: str
    tokens: int


@pytest.fixture(scope="module")
def model(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served")
    shape = ModelSpec(dim=64, layers=2, heads=4, max_seq_len=512)
    result = train_local(
        TrainSpec(dataset=str(dataset), out=str(out), model=shape, steps=2, global_batch=2, micro_batch=2, seq_len=64)
    )
    assert result.model_dir is not None
    return Path(result.model_dir)


@pytest.fixture
def endpoint(tide: rt.Client, model: Path, eventually: Callable[..., None]) -> Iterator[rt.EndpointHandle]:
    spec = ServeSpec(name="tiny", model=str(model), replicas=Replicas(min=2, max=2), resources={"CPU": 1})
    handle = tide.serve(spec)
    yield handle.wait(replicas=2, timeout_s=360.0)
    handle.delete()
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED, within_s=60.0)


@pytest.fixture
def mortal(tide: rt.Client, model: Path, eventually: Callable[..., None]) -> Iterator[rt.EndpointHandle]:
    """Two replicas whose engines die of a certain prompt, as a thread does that nobody expected to."""
    spec = ServeSpec(
        name="mortal",
        model=str(model),
        replicas=Replicas(min=2, max=2),
        resources={"CPU": 1},
        engine={"kind": "fake", "die_on": "poison", "tokens_per_s": 50.0},
    )
    handle = tide.serve(spec)
    yield handle.wait(replicas=2, timeout_s=360.0)
    handle.delete()
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED, within_s=60.0)


def stream(handle: rt.EndpointHandle, number: int, began: list[int]) -> End:
    client = handle.openai(max_retries=0, timeout=180.0)
    tokens = 0
    try:
        for chunk in client.completions.create(
            model="tiny",
            prompt=f"def f{number}(",
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ):
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            began.append(number)
    except openai.APIConnectionError:
        return End("connection", tokens)
    except openai.APIError as error:
        return End(str(error.code), tokens)
    return End("done", tokens)


def test_a_replica_killed_under_32_streams_ends_none_and_new_requests_succeed(
    live: LocalCluster, tide: rt.Client, endpoint: rt.EndpointHandle, eventually: Callable[..., None]
) -> None:
    eventually(lambda: "2 of 2" in endpoint.refresh()._repr_html_())
    began: list[int] = []
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream, endpoint, number, began) for number in range(STREAMS)]
        eventually(lambda: len(set(began)) == STREAMS, within_s=60.0, every_s=0.01)
        before = settled_replica_pids(live, 2, eventually)
        os.kill(before[0], signal.SIGKILL)
        for _ in range(4):
            answer = endpoint.openai(max_retries=0, timeout=120.0).completions.create(
                model="tiny", prompt="x", max_tokens=1
            )
            assert answer.choices[0].finish_reason in ("length", "stop")
        ends = [future.result(timeout=180.0) for future in streams]
    assert {(end.how, end.tokens) for end in ends} == {("done", TOKENS)}
    eventually(lambda: len(set(replica_pids(live)) - {before[0]}) == 2, within_s=60.0)


def test_a_replica_whose_engine_died_gets_no_more_requests_and_is_replaced(
    live: LocalCluster,
    mortal: rt.EndpointHandle,
    eventually: Callable[..., None],
    raytide_cli: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """While it is idle and fails at once it would be the router's favourite."""
    client = mortal.openai(max_retries=0, timeout=180.0)
    before = set(settled_replica_pids(live, 2, eventually))

    def ask(prompt: str) -> str:
        try:
            client.completions.create(model="mortal", prompt=prompt, max_tokens=25)
        except openai.APIStatusError as error:
            return str(error.code)
        return "ok"

    with ThreadPoolExecutor(8) as pool:
        load = [pool.submit(ask, f"hello {number}") for number in range(160)]
        assert ask("poison") == "engine_dead"
        ends = [future.result(timeout=180.0) for future in load]
    assert set(ends) == {"ok"}, "no other request is lost with it"
    eventually(lambda: len(replica_pids(live)) == 2 and before - set(replica_pids(live)), within_s=90.0)
    assert {ask(f"after {number}") for number in range(10)} == {"ok"}

    def last_words() -> list[str]:
        return list(mortal.logs(grep="ends itself"))

    def printed() -> list[str]:
        return raytide_cli("logs", "mortal", "--grep", "ends itself", "--tail", "1000").stdout.splitlines()

    def are_of_one_that_is_gone() -> bool:
        names = {line.partition(" ")[0] for line in last_words()}
        return bool(names) and not names & {start.id for start in mortal.refresh().status.startups}

    eventually(are_of_one_that_is_gone)
    eventually(lambda: printed() == last_words() != [])


def test_an_endpoint_without_requests_has_no_replica_and_the_next_request_starts_one(
    live: LocalCluster, tide: rt.Client, model: Path, eventually: Callable[..., None]
) -> None:
    spec = ServeSpec(
        name="idle",
        model=str(model),
        replicas=Replicas(min=0, max=1, downscale_delay_s=3.0),  # or `wait` might never see it
        resources={"CPU": 1},
        engine={"kind": "fake"},
    )
    handle = tide.serve(spec).wait(replicas=1, timeout_s=360.0)
    client = handle.openai(max_retries=0, timeout=360.0)
    assert client.completions.create(model="idle", prompt="x", max_tokens=5).choices[0].text == "tide "
    eventually(lambda: handle.refresh().status.endpoint.target_replicas == 0, within_s=90.0)
    eventually(lambda: handle.refresh().status.ready_replicas == 0, within_s=30.0)
    assert handle.refresh().status.endpoint.state is EndpointState.RUNNING
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(client.completions.create, model="idle", prompt="x", max_tokens=5) for _ in range(4)]
        assert {future.result(timeout=360.0).choices[0].text for future in asking} == {"tide "}
    handle.delete()
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED, within_s=60.0)
