"""The official client in strict mode, against the app in plain uvicorn."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import openai
import pytest
from openai import OpenAI

from raytide.actors.engine.backends.fake import FakeEngine

Serve = Callable[..., str]
ClientOf = Callable[[str], OpenAI]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def url(serve: Serve) -> str:
    return serve(FakeEngine(reply="tide ", max_model_len=64))


@pytest.fixture
def client(url: str, client_of: ClientOf) -> OpenAI:
    return client_of(url)


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "raytide"


def test_a_completion_counts_its_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=7)
    assert answer.choices[0].text == "tide ti"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 7, 12)


@pytest.mark.parametrize("prompt", [["ab", "cd"], [[97, 98], [99, 100]]])
def test_each_prompt_of_a_list_gets_its_choices_and_counts_once(client: OpenAI, prompt: list[object]) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=3, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)


def test_a_prompt_of_token_ids_is_one_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[1, 2, 3], max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_a_chat_stops_at_a_stop_string(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, stop=["de t"], max_completion_tokens=30)
    assert answer.choices[0].message.content == "ti"
    assert answer.choices[0].finish_reason == "stop"


def test_text_parts_are_read_as_text(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
    split = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert whole.usage is not None
    assert split.usage is not None
    assert whole.usage.prompt_tokens == split.usage.prompt_tokens


def test_a_chat_stream_opens_with_the_role_and_ends_with_reason_then_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "tide t"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_choices_of_a_stream_are_told_apart(client: OpenAI) -> None:
    said = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9, n=3, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == {0: "tide tide", 1: "tide tide", 2: "tide tide"}


def test_a_completion_stream_ends_with_done_on_the_wire(url: str) -> None:
    # Not with the strict client: it types `finish_reason` of every chunk as non-null, against OpenAI's own streams.
    body = {"model": "fake", "prompt": "hello", "max_tokens": 4, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    events = answer.text.strip().split("\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]


def test_a_chats_logprobs_come_with_bytes_and_alternatives(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=1, n=2
    )
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [each.token for each in choice.logprobs.content] == ["t", "i", "d"]
        first = choice.logprobs.content[0]
        assert (first.logprob, first.bytes, [each.token for each in first.top_logprobs]) == (0.0, [116], ["t"])


def test_a_chat_stream_carries_logprobs_with_the_text_they_belong_to(client: OpenAI) -> None:
    stream = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=3, logprobs=True, stream=True)
    scored = [(c.delta.content, c.logprobs) for chunk in stream for c in chunk.choices if c.logprobs]
    tokens = [each.token for _, logprobs in scored for each in logprobs.content or []]
    assert "".join(text or "" for text, _ in scored) == "".join(tokens) == "tid"


def test_a_completions_logprobs_say_where_each_token_is(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs) == (["t", "i", "d"], [0, 1, 2], [0, 0, 0])
    assert logprobs.top_logprobs == [{"t": 0.0}, {"i": 0.0}, {"d": 0.0}]


@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab"]])
def test_an_echo_begins_with_the_prompt(client: OpenAI, prompt: object) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2, echo=True, n=2)  # type: ignore[arg-type]
    assert [choice.text for choice in answer.choices] == ["abti", "abti"]


def test_choices_of_several_prompts_count_each_prompt_once(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["ab", "cde"], max_tokens=4, n=3)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)


@pytest.mark.parametrize("encoding", ["float", openai.NOT_GIVEN])
def test_embeddings_have_length_1_however_they_travel(url: str, encoding: object) -> None:
    """Unless it is told otherwise the client asks for base64 and decodes it, which the strict one cannot."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="fake", input=["hello", "other"], encoding_format=encoding)  # type: ignore[arg-type]
    assert [each.index for each in answer.data] == [0, 1]
    lengths = [sum(value * value for value in each.embedding) for each in answer.data]
    assert lengths == pytest.approx([1.0, 1.0], abs=1e-5)
    assert answer.data[0].embedding != answer.data[1].embedding
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (10, 10)


@pytest.mark.parametrize(
    ("change", "param"), [({"input": []}, "input"), ({"input": ""}, "input"), ({"dimensions": 2}, "dimensions")]
)
def test_embeddings_that_cannot_be_had_are_refused(client: OpenAI, change: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(**{"model": "fake", "input": "x", **change})  # type: ignore[arg-type]
    assert caught.value.param == param


def test_every_response_names_request_replica_and_time(client: OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model="fake", messages=HELLO, max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-raytide-replica"] == "local"
    assert int(answer.headers["openai-processing-ms"]) >= 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"extra_body": {"colour": "blue"}}, "colour"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"extra_body": {"min_tokens": 9, "max_tokens": 3}}, "min_tokens"),
        ({"n": 3, "extra_body": {"best_of": 2}}, "best_of"),
        ({"stream": True, "extra_body": {"best_of": 2}}, "best_of"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "guided_regex"),
        # What the engine behind does not declare:
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"extra_body": {"bad_words": ["x"]}}, "bad_words"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(client: OpenAI, change: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "fake", "messages": HELLO, **change})  # type: ignore[arg-type]
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)
    assert set(caught.value.body) == {"message", "type", "param", "code"}  # type: ignore[arg-type]


@pytest.mark.parametrize("extra", [{"user": "u"}, {"metadata": {}}, {"tools": []}, {"logprobs": None}, {"top_k": -1}])
def test_fields_that_ask_for_nothing_are_accepted(client: OpenAI, extra: dict[str, object]) -> None:
    assert client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1, extra_body=extra).choices


def test_a_prompt_beyond_the_context_says_so(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x" * 64)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_an_unknown_model_is_a_404(client: OpenAI) -> None:
    for ask in (
        lambda: client.chat.completions.create(model="gone", messages=HELLO),
        lambda: client.models.retrieve("gone"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(("path", "body", "status"), [("/v1/completions", "{", 400), ("/v1/nothing", "{}", 404)])
def test_errors_outside_the_routes_have_the_same_body(url: str, path: str, body: str, status: int) -> None:
    answer = httpx.post(url + path, content=body, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "extra",
    [
        {"guided_regex": "a+"},
        {"structured_outputs": {"regex": "a+"}},
        {"response_format": {"type": "json_object"}},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 2.0},
    ],
)
def test_a_field_that_needs_what_the_engine_lacks_is_named(client: OpenAI, extra: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=HELLO, extra_body=extra)
    assert caught.value.param == next(iter(extra))
