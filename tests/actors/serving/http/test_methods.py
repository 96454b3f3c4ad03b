"""Methods of HTTP beside those of OpenAI's clients."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from raytide.actors.engine.backends.fake import FakeEngine


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/v1/chat/completions", "POST"), ("/v1/models", "GET, HEAD"), ("/v1/responses/input_tokens", "POST")],
)
def test_a_refused_method_names_the_allowed_ones(serve: Callable[..., str], path: str, allowed: str) -> None:
    answer = httpx.request("TRACE", serve(FakeEngine()) + path, timeout=60)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_head_is_a_get_without_its_body(serve: Callable[..., str]) -> None:
    url = serve(FakeEngine())
    with httpx.Client(timeout=60) as client:
        for path in ("/health", "/v1/models", "/v1/models/fake"):
            answer, whole = client.head(url + path), client.get(url + path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-length"] == str(len(whole.content))
        assert client.head(url + "/v1/nothing").status_code == 404
        assert client.head(url + "/v1/completions").headers["allow"] == "POST"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_of_another_type_is_refused_with_a_hint(serve: Callable[..., str], content_type: str) -> None:
    """Web pages may send these to another origin without asking."""
    body = b'{"model": "fake", "prompt": "x"}'
    url = serve(FakeEngine()) + "/v1/completions"
    answer = httpx.post(url, content=body, headers={"content-type": content_type}, timeout=60)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    for named in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert httpx.post(url, content=body, headers={"content-type": named}, timeout=60).status_code == 200


def test_json_may_begin_with_a_byte_order_mark_and_write_integers_with_a_point(serve: Callable[..., str]) -> None:
    body = b'\xef\xbb\xbf{"model": "fake", "prompt": [1.0, 2], "max_tokens": 2.0}'
    answer = httpx.post(
        serve(FakeEngine()) + "/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", True), ("prompt", [[False]]), ("temperature", "1"), ("stream", 0), ("n", "1")]
)
def test_values_of_another_type_are_not_converted(serve: Callable[..., str], field: str, value: object) -> None:
    body = {"model": "fake", "prompt": "x", field: value}
    answer = httpx.post(serve(FakeEngine()) + "/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
