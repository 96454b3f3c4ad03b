"""Answers are kept for API keys that opted in, where the endpoint keeps some."""

from __future__ import annotations

from collections.abc import Callable

from tests.gateway.conftest import running_gateway
from tests.gateway.tenancy.conftest import Line

from raytide.actors.engine.backends.fake import FakeEngine


async def test_only_keys_that_opted_in_get_and_leave_kept_answers(line: Line, secret_of: Callable[..., str]) -> None:
    plain, keeping, other = secret_of(), secret_of(answer_cache=True), secret_of(answer_cache=True, team="other")
    engine = FakeEngine()
    async with running_gateway(requires_keys=True, api=line.api()) as gateway:
        await gateway.deploy("kept", engine, answer_cache={"ttl_s": 60})
        await gateway.deploy("plain", FakeEngine())

        async def is_hit(secret: str, model: str = "kept") -> bool:
            body = {"model": model, "prompt": "hello", "temperature": 0, "max_tokens": 5}
            headers = {"authorization": f"Bearer {secret}"}
            answer = await gateway.http.post("/v1/completions", json=body, headers=headers)
            assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "tide ")
            return answer.headers.get("x-raytide-cache") == "hit"

        assert [await is_hit(plain) for _ in range(2)] == [False, False]
        assert [await is_hit(keeping) for _ in range(2)] == [False, True]  # the plain one has left none
        assert not await is_hit(plain)
        assert [await is_hit(other) for _ in range(2)] == [False, True]
        assert [await is_hit(keeping, "plain") for _ in range(2)] == [False, False]
        assert (await engine.stats()).generated_tokens == 5 * 5
