"""A metrics page over a real socket, also for clients that are none of Prometheus'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from raytide.core.telemetry import page as module
from raytide.core.telemetry.metrics import Metric, MetricSample, Sample
from raytide.core.telemetry.page import MetricsPage

ASKED = Metric("raytide_asked", "counter", "Fields of a query", labels=("names",))


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async def page(query: dict[str, list[str]]) -> list[Sample]:
        return [MetricSample(ASKED, len(query), tuple(query.get("names", [""])))]

    served = MetricsPage(page)
    yield await served.start("127.0.0.1")
    served.close()


async def test_a_page_is_read_with_its_query_and_nothing_else_is_there(address: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address}") as http:
        answer = await http.get("/metrics", params={"names": "vllm"})
        assert (answer.status_code, answer.text.splitlines()[-1]) == (200, 'raytide_asked_total{names="vllm"} 1.0')
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert (await http.head("/metrics")).content == b""
        newer = await http.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"})
        assert newer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert [family.name for family in parse_openmetrics(newer.text)] == ["raytide_asked"]
        assert (await http.get("/")).status_code == 404
        assert (await http.post("/metrics", content=b"x" * 100)).status_code == 405


@pytest.mark.parametrize(
    "sent", [b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"x" * 20_000, b""]
)
async def test_a_client_that_speaks_something_else_breaks_nothing(address: str, sent: bytes) -> None:
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    writer.write_eof()
    with suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)
    writer.close()
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"http://{address}/metrics")).status_code == 200


async def test_a_client_that_sends_nothing_is_cut_off(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.05)
    host, _, port = address.partition(":")
    reader, _ = await asyncio.open_connection(host, int(port))
    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
