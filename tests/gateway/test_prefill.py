"""Long prompts of one endpoint are computed by another one's replicas; short ones, and whatever fails, at home."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.actors.engine.tiny import save_llama
from tests.gateway.conftest import Gateway, running_gateway, until

from raytide.actors.engine import EngineConfig, NativeEngine
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import GenRequest
from raytide.gateway.replicas.prefill_pool import PrefillPool
from raytide.gateway.replicas.replica_set import Replica
from raytide.gateway.replicas.routing.router import Router

POLICY = {"endpoint": "prefill", "min_tokens": 32}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_llama(path)
    return path


def native(model_dir: Path) -> NativeEngine:
    return NativeEngine(EngineConfig(model_dir=str(model_dir), block_size=4, max_model_len=128))


def prompt_of(tokens: int) -> list[int]:
    return [40 + tokens * number % 47 for number in range(tokens)]


async def answer(gateway: Gateway, asked: int | list[int], **fields: object) -> tuple[str, int]:
    """Returns the text that `chat` gives, and the tokens of its prompt that were cached."""
    prompt = prompt_of(asked) if isinstance(asked, int) else asked
    tokens = len(prompt)
    body = {"model": "chat", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    response = await gateway.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    whole = response.json()
    assert whole["usage"]["prompt_tokens"] == tokens
    return "".join(each["text"] for each in whole["choices"]), whole["usage"]["prompt_tokens_details"]["cached_tokens"]


async def computed(gateway: Gateway, replica: str) -> float:
    """Returns the prompt tokens that a replica has computed."""
    load = (await gateway.servers[replica].status())[2]
    return float(load["prompt_tokens"])


async def test_long_prompts_go_to_the_other_endpoint(model_dir: Path) -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("chat", native(model_dir))
        expected = await answer(gateway, 80)
    async with running_gateway() as gateway:
        await gateway.deploy("prefill", native(model_dir))
        await gateway.deploy("chat", native(model_dir), prefill=POLICY)
        assert await answer(gateway, 80) == expected
        assert (await computed(gateway, "prefill-0"), await computed(gateway, "chat-0")) == (80, 0)
        await answer(gateway, 20)
        assert (await computed(gateway, "prefill-0"), await computed(gateway, "chat-0")) == (80, 20)


async def test_a_cached_prompt_stays_where_it_is_cached(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_gateway() as gateway:
        other = native(model_dir)
        await gateway.deploy("prefill", other)
        await gateway.deploy("chat", native(model_dir), prefill=POLICY)
        core = other._core
        assert core is not None
        step = core.step

        def slow_step() -> object:
            time.sleep(0.1)  # a whole answer would otherwise be computed before its KV is asked for
            return step()

        monkeypatch.setattr(core, "step", slow_step)
        first, _ = await answer(gateway, 80, max_tokens=40)
        again, cached = await answer(gateway, 80, max_tokens=40)
        assert (again, await computed(gateway, "prefill-0")) == (first, 80)
        assert cached >= 72  # whole blocks


@pytest.mark.parametrize("fields", [{"n": 2, "temperature": 0.5}, {"max_tokens": 1}], ids=["samples", "one token"])
async def test_what_cannot_be_handed_over_is_computed_at_home(model_dir: Path, fields: dict[str, object]) -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("prefill", native(model_dir))
        await gateway.deploy("chat", native(model_dir), prefill=POLICY)
        await answer(gateway, 80, **fields)
        assert (await computed(gateway, "prefill-0"), await computed(gateway, "chat-0")) == (0, 80)


@pytest.mark.parametrize("why", ["no such endpoint", "no replica", "another team", "other weights"])
async def test_without_a_fitting_replica_it_is_computed_at_home(model_dir: Path, why: str) -> None:
    async with running_gateway() as gateway:
        if why != "no such endpoint":
            engine = native(model_dir)
            await gateway.deploy("prefill", engine, team="others" if why == "another team" else "default")
            if why == "no replica":
                await gateway.kill("prefill-0")
        await gateway.deploy("chat", native(model_dir), prefill=POLICY)
        if why == "other weights":
            await engine.load_weights(str(model_dir), "another")
            replicas = gateway.models.endpoint("prefill")[1]

            async def are_known() -> bool:
                return all(each.info.weights_version == "another" for each in replicas.connected)

            await until(are_known)
        await answer(gateway, 80)
        assert await computed(gateway, "chat-0") == 80


async def test_what_the_other_cache_lacks_is_still_known_at_home(model_dir: Path) -> None:
    """Its usage says that nothing was cached; taken as the decoding replica's, all older prefixes would be dropped."""
    async with running_gateway() as gateway:
        await gateway.deploy("prefill", native(model_dir))
        await gateway.deploy("chat", native(model_dir), prefill=POLICY)
        older, newer = prompt_of(20), prompt_of(21)
        await answer(gateway, older)
        await answer(gateway, newer)
        await answer(gateway, newer + prompt_of(60))
        assert await computed(gateway, "prefill-0") == 81
        replicas = gateway.models.endpoint("chat")[1]
        route = replicas.router.route(older, [each.routing_state() for each in replicas.ready])
        route.end()
        assert route.cached_tokens == 16


def test_a_prompt_at_the_other_endpoint_is_overdue_when_its_promised_time_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = SimpleNamespace(features={"handover"}, weights_version="1", num_blocks=0, block_size=16)
    replica = Replica("p", SimpleNamespace(status=SimpleNamespace(stats=None)), info)  # type: ignore[arg-type]
    router, now_s = Router(), 1000.0
    router.slo_ttft_s = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    asked = GenRequest(request_id="r-0", prompt=prompt_of(80), sampling=SamplingParams())
    replicas: Any = SimpleNamespace(ready=[replica], router=router)
    assert PrefillPool(replicas, min_tokens=32).route(asked, replica, 0) is not None

    def overdue() -> int:
        router.route(prompt_of(20), [replica.routing_state()]).end()
        return router._assigned["p"].overdue

    assert overdue() == 0
    now_s += 6.0
    assert overdue() == 1
