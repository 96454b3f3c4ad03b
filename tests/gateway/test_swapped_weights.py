"""The gateway notices that a replica serves other weights."""

from __future__ import annotations

import pytest
from tests.gateway.conftest import running_gateway, until

from raytide.actors.engine.backends.fake import FakeEngine


@pytest.mark.asyncio
async def test_answers_of_other_weights_are_not_reused_and_prefixes_are_forgotten() -> None:
    async with running_gateway() as gateway:
        engine = FakeEngine()
        await gateway.deploy("tide", engine, answer_cache={"ttl_s": 300.0})
        ask = {"model": "tide", "prompt": "the tide " * 20, "max_tokens": 5, "temperature": 0}

        async def how() -> str:
            answer = await gateway.http.post("/v1/completions", json=ask)
            assert answer.status_code == 200
            return answer.headers["x-raytide-replica"]

        assert [await how(), await how()] == ["tide-0", "cache"]
        await engine.load_weights("/new")
        server, replicas = gateway.models.endpoint("tide")

        async def is_noticed() -> bool:
            return server.info.weights_version == "/new"

        await until(is_noticed)
        assert [replica.info.weights_version for replica in replicas.ready] == ["/new"]
        assert [await how(), await how()] == ["tide-0", "cache"]
