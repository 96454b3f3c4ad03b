"""Methods that a route does not have."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from raytide.actors.engine.backends.fake import FakeEngine


@pytest.mark.parametrize(("path", "allowed"), [("/v1/chat/completions", "POST"), ("/v1/models", "GET")])
def test_a_refused_method_names_the_allowed_ones(serve: Callable[..., str], path: str, allowed: str) -> None:
    answer = httpx.request("TRACE", serve(FakeEngine()) + path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
