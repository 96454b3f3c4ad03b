"""The Responses API, by the official client in strict mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.serving.protocols.responses_api import routes

Serve = Callable[..., str]
ClientOf = Callable[[str], OpenAI]
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = 'I look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def client(serve: Serve, client_of: ClientOf) -> OpenAI:
    return client_of(serve(FakeEngine(reply="tide ", max_model_len=2000)))


@pytest.fixture
def caller(serve: Serve, client_of: ClientOf) -> OpenAI:
    """A model that always answers with the same call."""
    return client_of(serve(FakeEngine(reply=CALL)))


def test_an_answer_and_its_usage(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hello", instructions="Be brief.", max_output_tokens=7)
    assert answer.output_text == "tide ti"
    assert (answer.status, answer.instructions) == ("incomplete", "Be brief.")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 7
    assert answer.usage.total_tokens == answer.usage.input_tokens + 7


def streamed(client: OpenAI, **ask: Any) -> tuple[list[str], Any]:
    """The types of the events, and the response of the last one."""
    events: list[Any] = list(client.responses.create(stream=True, **ask))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return [event.type for event in events], events[-1].response


def test_a_stream_is_the_same_answer_in_typed_events(client: OpenAI) -> None:
    events, final = streamed(client, model="fake", input="hello", max_output_tokens=7)
    assert events[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert final.output_text == "tide ti"


def test_a_stream_has_the_log_probabilities_of_all_tokens(client: OpenAI) -> None:
    ask: Any = {"model": "fake", "input": "hello", "tools": [TOOL], "max_output_tokens": 7, "top_logprobs": 1}
    events: list[Any] = list(client.responses.create(stream=True, **ask))
    sent = [each.token for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    answer: Any = client.responses.create(**ask)
    whole = answer.output[0].content[0].logprobs
    assert whole is not None and "".join(each.token for each in whole) == "tide ti"
    assert sent == [each.token for each in done.logprobs] == [each.token for each in whole]
    assert events[-1].response.output[0].content[0].logprobs == whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_an_item_of_its_own(caller: OpenAI, stream: bool) -> None:
    ask: Any = {"model": "fake", "input": "?", "tools": [TOOL], "max_output_tokens": len(CALL)}
    if stream:
        kinds, answer = streamed(caller, **ask)
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= {*kinds}
    else:
        answer = caller.responses.create(**ask)
    message, call = answer.output
    assert message.type == "message" and answer.output_text == "I look."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("left", [0, len('lo"}}</tool_call>')])
def test_only_the_item_that_is_cut_is_incomplete(caller: OpenAI, stream: bool, left: int) -> None:
    ask: Any = {"model": "fake", "input": "?", "tools": [TOOL], "max_output_tokens": len(CALL) - left}
    answer = streamed(caller, **ask)[1] if stream else caller.responses.create(**ask)
    assert answer.status == "incomplete"
    assert [item.status for item in answer.output] == ["completed", "incomplete" if left else "completed"]


def test_a_call_that_is_cut_before_its_name_is_no_item(caller: OpenAI) -> None:
    ends_in_name = len(CALL) + CALL.index("weather")
    answer = caller.responses.create(model="fake", input="?", tools=[TOOL], max_output_tokens=ends_in_name)
    assert [item.type for item in answer.output] == ["message", "function_call"]
    assert answer.status == "incomplete"


def test_the_history_of_calls_is_sent_back(client: OpenAI) -> None:
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ]
    assert client.responses.create(model="fake", input=history, tools=[TOOL], max_output_tokens=4).output_text == "tide"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": "../x"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"extra_body": {"colour": "blue"}}, "colour"),
        ({"input": [{"type": "input_image"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}, {"type": "y"}]}]},
            "input[0].content[1]",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "function", "name": "no spaces!"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 5}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [5]}}, "tool_choice"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(65)}}, "metadata"),
        ({"user": 5}, "user"),
        ({"store": "yes"}, "store"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(client: OpenAI, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "fake", "input": "x", **extra})
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)


def test_fields_that_ask_for_nothing_are_accepted(client: OpenAI) -> None:
    extra: Any = {"metadata": {"a": "b"}, "truncation": "disabled", "previous_response_id": None}
    answer = client.responses.create(model="fake", input="x", max_output_tokens=1, **extra)
    assert answer.metadata == {"a": "b"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_stored_and_retrieved_as_it_was(client: OpenAI, stream: bool) -> None:
    ask: Any = {"model": "fake", "input": "hello", "max_output_tokens": 7, "metadata": {"a": "b"}}
    answer = streamed(client, **ask)[1] if stream else client.responses.create(**ask)
    assert answer.store is True
    assert client.responses.retrieve(answer.id) == answer


def test_an_answer_goes_on_from_an_earlier_one(serve: Serve, client_of: ClientOf) -> None:
    engine = FakeEngine(reply="tide ", max_model_len=2000)
    client = client_of(serve(engine))

    def tokens(**ask: Any) -> int:
        return client.responses.input_tokens.count(model="fake", **ask).input_tokens

    first = client.responses.create(model="fake", input="hello", instructions="Be brief.", max_output_tokens=4)
    second = client.responses.create(
        model="fake", input="and then?", previous_response_id=first.id, max_output_tokens=4, instructions="Be long."
    )
    assert second.previous_response_id == first.id
    turns: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "tide"},
        {"role": "user", "content": "and then?"},
    ]
    assert second.usage is not None
    assert second.usage.input_tokens == tokens(input=turns, instructions="Be long.")
    assert tokens(input="!", previous_response_id=second.id) == tokens(
        input=[*turns, {"role": "assistant", "content": "tide"}, {"role": "user", "content": "!"}]
    )
    assert client.responses.delete(first.id) is None  # type: ignore[func-returns-value]
    third = client.responses.create(model="fake", input="!", previous_response_id=second.id, max_output_tokens=1)
    assert third.usage is not None, "what follows needs the last response alone"


def test_a_call_and_its_result_are_turns_of_what_follows(caller: OpenAI) -> None:
    first = caller.responses.create(model="fake", input="?", tools=[TOOL], max_output_tokens=len(CALL))
    call = next(item for item in first.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}
    second = caller.responses.create(
        model="fake", input=[result], previous_response_id=first.id, tools=[TOOL], max_output_tokens=4
    )
    assert second.output_text == "I lo"
    items = caller.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output"]


def test_items_of_stored_answers_are_named_by_their_ids(serve: Serve, client_of: ClientOf) -> None:
    """As the AI SDK does in the steps of a loop with tools."""
    client = client_of(serve(FakeEngine(reply=CALL)))
    ask: Any = {"model": "fake", "tools": [TOOL]}
    question: Any = {"role": "user", "content": "?"}
    first = client.responses.create(**ask, input=[question], max_output_tokens=len(CALL))
    call = next(item for item in first.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}
    named: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    second = client.responses.create(**ask, input=[question, *named, result], max_output_tokens=4)
    assert second.output_text == "I lo"
    whole: Any = [item.model_dump() for item in first.output]
    count = client.responses.input_tokens.count
    assert second.usage is not None
    assert second.usage.input_tokens == count(**ask, input=[question, *whole, result]).input_tokens
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output"]
    unstored = client.responses.create(**ask, input="?", max_output_tokens=4, store=False)
    for wrong in (unstored.output[0].id, f"{named[0]['id']}9", "msg_none", "", None):
        item: Any = {"type": "item_reference", "id": wrong}
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.create(**ask, input=[item])


def test_more_stored_answers_than_a_request_may_name_are_refused(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_REFERRED", 2)
    answers = [client.responses.create(model="fake", input="x", max_output_tokens=1) for _ in range(3)]
    named: Any = [{"type": "item_reference", "id": answer.output[0].id} for answer in answers]
    assert client.responses.create(model="fake", input=[*named[:2], *named[:2]], max_output_tokens=1).id
    with pytest.raises(openai.BadRequestError, match="more than 2 responses"):
        client.responses.create(model="fake", input=named)


def test_a_request_may_not_name_items_that_are_too_large_together(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_RESPONSE_BYTES", 1000)
    answer = client.responses.create(model="fake", input="x", max_output_tokens=1).output[0].id
    named: Any = [{"type": "item_reference", "id": answer}] * 20
    assert client.responses.create(model="fake", input=named[:2], max_output_tokens=1).id
    with pytest.raises(openai.BadRequestError, match="together too large"):
        client.responses.create(model="fake", input=named)


def test_the_items_of_an_input_are_listed_in_pages(client: OpenAI) -> None:
    turns: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    answer = client.responses.create(model="fake", input=turns, max_output_tokens=1)
    for order, expected in (("desc", "43210"), ("asc", "01234")):
        items: Any = list(client.responses.input_items.list(answer.id, order=order, limit=2))  # type: ignore[arg-type]
        assert "".join(item.content[0].text for item in items) == expected
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(answer.id, after="msg_none")


def test_what_is_not_stored_is_not_found(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="x", max_output_tokens=1, store=False)
    assert answer.store is False
    for response_id in (answer.id, "resp_none", "none", "resp_%00"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.retrieve(response_id)
        assert caught.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(response_id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake", input="x", previous_response_id=answer.id)
    assert refused.value.code == "previous_response_not_found"


def test_a_deleted_answer_is_gone(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="x", max_output_tokens=1)
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_stored_answer_is_not_streamed_again(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="x", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(answer.id, stream=True)
    assert caught.value.param == "stream"


def test_the_end_of_a_cut_stream_has_the_whole_answer(client: OpenAI) -> None:
    """`get_final_response` of the client takes only `response.completed`, with OpenAI's own server too."""
    with client.responses.stream(model="fake", input="hello", max_output_tokens=7) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "tide ti"
    assert last.response == client.responses.retrieve(last.response.id)


@pytest.mark.parametrize("item", [{"id": 5}, {"id": ""}, {"id": []}, {"id": None}])
def test_an_item_without_an_id_of_text_is_listed_with_one(client: OpenAI, item: dict[str, Any]) -> None:
    turn: Any = {"role": "user", "content": "x", **item}
    answer = client.responses.create(model="fake", input=[turn], max_output_tokens=1)
    (listed,) = client.responses.input_items.list(answer.id)
    assert listed.id is not None
    assert listed.id.startswith("msg_")


@pytest.mark.parametrize("turns", [[{"type": []}], [{"type": {}}], [{}], [{"type": "function_call", "id": {}}]])
def test_a_bad_item_behind_an_earlier_answer_is_refused_as_one_alone_is(client: OpenAI, turns: Any) -> None:
    first = client.responses.create(model="fake", input="x", max_output_tokens=1)
    for previous in (None, first.id):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="fake", input=turns, previous_response_id=previous)
