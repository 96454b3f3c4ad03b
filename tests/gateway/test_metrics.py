"""The gateway's metrics: what a process counts of its requests, and who may see it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.conftest import Gateway, running_gateway, until
from tests.gateway.tenancy.conftest import Line, line, secret_of, store  # noqa: F401
from tests.gateway.test_hosted import HOSTED, hosted_gateway

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.core.telemetry.catalogue import METRICS
from raytide.core.telemetry.metrics import render

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def value(gateway: Gateway, name: str, **labels: str) -> float:
    """Returns the sum of the gateway's series with these labels."""
    page = render([*gateway.models.samples(), *gateway.tenancy.samples()]).decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def ask(gateway: Gateway, model: str, secret: str = "", **more: Any) -> int:
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    body = {**CHAT, "model": model, **more}
    return (await gateway.http.post("/v1/chat/completions", json=body, headers=headers)).status_code


async def test_each_request_is_counted_once_with_its_outcome_code_and_revision() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("tide", FakeEngine(fail_on="boom"))
        gateway.listing["tide"] = dataclasses.replace(gateway.listing["tide"], revision=7)
        gateway.models.update(gateway.listing)
        for model, status, more in (
            ("tide", 200, {}),
            ("tide", 200, {"stream": True}),
            ("tide", 400, {"temperature": 9}),
            ("tide", 500, {"messages": [{"role": "user", "content": "boom"}]}),
            ("none", 404, {}),
        ):
            assert await ask(gateway, model, **more) == status
        for endpoint, revision, outcome, code, count in (
            ("tide", "7", "ok", "", 2),
            ("tide", "7", "error", "engine", 1),
            ("", "", "invalid", "", 1),  # its body was refused before its model was known
            ("", "", "invalid", "model_not_found", 1),
        ):
            labels = {"endpoint": endpoint, "revision": revision, "outcome": outcome, "code": code, "api": "chat"}
            assert value(gateway, "raytide_requests_total", **labels) == count
        assert value(gateway, "raytide_requests_total") == 5
        for name in ("time_to_first_token", "queue", "prefill", "decode", "inference"):
            assert value(gateway, f"raytide_{name}_seconds_count", endpoint="tide", revision="7") == 2
        assert 0 < value(gateway, "raytide_inter_token_seconds_count") <= 8, "the first tokens may come together"
        assert value(gateway, "raytide_finished_total", endpoint="tide", reason="length") == 2
        assert value(gateway, "raytide_request_generated_tokens_sum") == 10


async def test_only_endpoints_with_a_promise_count_whether_it_was_met() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("fast", FakeEngine(fail_on="boom"), replicas={"slo_ttft_s": 60.0})
        await gateway.deploy("slow", FakeEngine(tokens_per_s=50), replicas={"slo_ttft_s": 0.001})
        await gateway.deploy("free", FakeEngine())
        for model in ("fast", "slow", "free"):
            assert await ask(gateway, model) == 200
        await ask(gateway, "fast", messages=[{"role": "user", "content": "boom"}])
        counted = {(e, m): value(gateway, "raytide_slo_requests_total", endpoint=e, met=m)
                   for e in ("fast", "slow", "free") for m in ("true", "false")}  # fmt: skip
        assert {key for key, count in counted.items() if count} == {
            ("fast", "true"),
            ("fast", "false"),
            ("slow", "false"),
        }


async def test_a_stream_that_goes_on_elsewhere_is_counted() -> None:
    async with running_gateway() as gateway:
        engines = [FakeEngine(tokens_per_s=20), FakeEngine(tokens_per_s=20)]
        await gateway.deploy("tide", *engines)
        asked = asyncio.create_task(ask(gateway, "tide", max_tokens=80))

        async def has_begun() -> bool:
            return sum([(await engine.stats()).generated_tokens for engine in engines]) > 5  # the gateway has the first

        await until(has_begun)
        await gateway.kill(f"tide-{[(await engine.stats()).running for engine in engines].index(1)}")
        assert await asked == 200
        assert value(gateway, "raytide_resumed_streams_total", endpoint="tide") == 1
        assert value(gateway, "raytide_requests_total", outcome="ok") == 1


async def test_tokens_are_counted_by_team_and_key_and_refusals_by_limit(
    line: Line,  # noqa: F811
    secret_of: Callable[..., str],  # noqa: F811
) -> None:
    secret = secret_of(name="web", team="blue", requests_per_min=2)
    async with running_gateway(api=line.api()) as gateway:
        await gateway.deploy("tide", FakeEngine())
        assert [await ask(gateway, "tide", secret) for _ in range(3)] == [200, 200, 429]
        assert await ask(gateway, "tide") == 200
        for team, key, count in (("blue", "web", 10), ("default", "", 5)):
            labels = {"endpoint": "tide", "team": team, "key": key}
            assert value(gateway, "raytide_tokens_total", kind="generated", **labels) == count
            assert value(gateway, "raytide_tokens_total", kind="prompt", **labels) > 0
        assert value(gateway, "raytide_rate_limited_total", team="blue", limit="requests") == 1
        assert value(gateway, "raytide_requests_total", outcome="limited", code="rate_limit_exceeded") == 1


async def test_hosted_answers_are_counted_as_own_ones() -> None:
    async with hosted_gateway() as (gateway, hosted):
        await gateway.deploy("far", **HOSTED)
        assert await ask(gateway, "far") == 200
        assert await ask(gateway, "far", stream=True) == 200
        hosted.status = 500
        assert await ask(gateway, "far") == 503
        assert value(gateway, "raytide_requests_total", endpoint="far", outcome="ok") == 2
        assert value(gateway, "raytide_requests_total", endpoint="far", outcome="error", code="hosted_api") == 1
        assert value(gateway, "raytide_time_to_first_token_seconds_count", endpoint="far") == 1


async def test_a_public_page_needs_a_key_and_shows_its_endpoints_alone(
    line: Line,  # noqa: F811
    secret_of: Callable[..., str],  # noqa: F811
) -> None:
    secret = secret_of(team="blue", models=["tide"])
    async with running_gateway(api=line.api(), requires_keys=True) as gateway:
        await gateway.deploy("tide", FakeEngine())
        await gateway.deploy("ebb", FakeEngine())
        assert await ask(gateway, "tide", secret) == 200
        for path in ("/metrics", "/tide/metrics"):
            assert (await gateway.http.get(path)).status_code == 401
            page = (await gateway.http.get(path, headers={"authorization": f"Bearer {secret}"})).text
            assert 'raytide_requests_total{api="chat",code="",endpoint="tide"' in page
            assert "ebb" not in page
            assert "raytide_tokens" not in page, "other teams' usage"


async def test_all_that_is_shown_is_in_the_catalogue() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("tide", FakeEngine())
        await ask(gateway, "tide")
        text = (await gateway.http.get("/metrics")).text
        own = render([*gateway.models.samples(), *gateway.tenancy.samples()]).decode()
    shown = {family.name: family for page in (text, own) for family in text_string_to_metric_families(page)}
    for name, family in shown.items():
        metric = METRICS[name]
        assert (family.type, family.documentation) == (metric.type, metric.help)
        assert all(set(sample.labels) - {"le"} == set(metric.labels) for sample in family.samples)
