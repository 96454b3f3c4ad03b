"""Methods of HTTP beside those of OpenAI's clients."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from raytide.actors.engine.backends.fake import FakeEngine


@pytest.mark.parametrize(("path", "allowed"), [("/v1/chat/completions", "POST"), ("/v1/models", "GET, HEAD")])
def test_a_refused_method_names_the_allowed_ones(serve: Callable[..., str], path: str, allowed: str) -> None:
    answer = httpx.request("TRACE", serve(FakeEngine()) + path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_head_is_a_get_without_its_body(serve: Callable[..., str]) -> None:
    url = serve(FakeEngine())
    with httpx.Client() as client:
        for path in ("/health", "/v1/models", "/v1/models/fake"):
            answer, whole = client.head(url + path), client.get(url + path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-length"] == str(len(whole.content))
        assert client.head(url + "/v1/nothing").status_code == 404
        assert client.head(url + "/v1/completions").headers["allow"] == "POST"
