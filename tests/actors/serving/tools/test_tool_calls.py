"""Tools over HTTP, by the official client in strict mode."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from tests.actors.serving.test_native_engine import model_dir, structuring

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.limits import MAX_ARGUMENT_CHARS
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import ChatFormat
from raytide.actors.serving.engines import build_engine
from raytide.actors.serving.openai_api import server
from raytide.actors.serving.openai_api.answers.bodies import Usage
from raytide.actors.serving.openai_api.answers.writer import ChatWriter, ChoiceState
from raytide.actors.serving.openai_api.chat.tool_choice import ToolUse, tool_use_of
from raytide.actors.serving.openai_api.wire import ChatRequest
from raytide.core.objects.endpoint import ServeSpec

__all__ = ["model_dir"]

Serve = Callable[..., str]
ClientOf = Callable[[str], OpenAI]
CALL = 'I look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
END = "<END>"
ASK: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "?"}], "stop": [END]}


def tool(name: str = "weather", parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


@pytest.fixture
def client(serve: Serve, client_of: ClientOf) -> OpenAI:
    """A model that always answers with the same call."""
    return client_of(serve(FakeEngine(reply=CALL + END)))


def test_a_call_in_the_output_is_a_call_in_the_answer(client: OpenAI) -> None:
    choice = client.chat.completions.create(**ASK, tools=[tool()]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    assert call.id.startswith("call_")


@pytest.mark.parametrize("stream", [False, True])
def test_a_name_that_is_not_valid_json_is_text(serve: Serve, client_of: ClientOf, stream: bool) -> None:
    output = CALL.replace("weather", "get\\_weather")
    chat = client_of(serve(FakeEngine(reply=output + END))).chat.completions
    if stream:
        with chat.stream(**ASK, tools=[tool()]) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = chat.create(**ASK, tools=[tool()]).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (output, None, "stop")


def test_an_answer_may_have_longer_arguments_than_a_request() -> None:
    body = ChatRequest.model_validate({**ASK, "tools": [tool()]})
    generation: Any = SimpleNamespace(tool_use=tool_use_of(body, ChatFormat()), sampling=SamplingParams())
    choice, usage = ChoiceState(), Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
    choice.text = CALL.replace("Oslo", "a" * MAX_ARGUMENT_CHARS)
    answer = ChatWriter(body, generation).full_response([choice], usage, lambda token: b"").model_dump()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "a" * MAX_ARGUMENT_CHARS}


def test_a_stream_says_the_same_piece_by_piece(client: OpenAI) -> None:
    with client.chat.completions.stream(**ASK, tools=[tool()]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    choice = final.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()] == [
        ("weather", '{"city": "Oslo"}')
    ]


def test_a_call_that_max_tokens_cuts_is_no_text_beside_the_calls_before_it(client: OpenAI) -> None:
    ask: Any = {**ASK, "tools": [tool()], "stop": None, "max_tokens": len(CALL + END + CALL) - 40}
    whole = client.chat.completions.create(**ask).choices[0]
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot.choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "length"
        assert (choice.message.content or "").endswith("I look.")
        assert "tool_call" not in (choice.message.content or "")
        assert len(choice.message.tool_calls or ()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_tools_of_a_request_are_looked_at_once(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    seen: list[object] = []

    def counted(request: ChatRequest, chat: ChatFormat) -> ToolUse:
        seen.append(request)
        return tool_use_of(request, chat)

    monkeypatch.setattr(server, "tool_use_of", counted)
    answer = client.chat.completions.create(**ASK, tools=[tool()], n=2, stream=stream)
    if stream:
        assert list(answer)
    assert len(seen) == 1


@pytest.mark.parametrize("extra", [{}, {"tool_choice": "none", "tools": [tool()]}, {"tool_choice": "none"}])
def test_without_tools_to_call_the_output_is_text(client: OpenAI, extra: dict[str, Any]) -> None:
    message = client.chat.completions.create(**ASK, **extra).choices[0].message
    assert message.content == CALL
    assert message.tool_calls is None


def test_the_history_may_hold_calls_and_their_results(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    answer = client.chat.completions.create(**{**ASK, "messages": history}, tools=[tool()])
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [tool()] * 200}, "tools"),
        ({"tools": [tool()], "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_tools_that_make_no_sense_are_a_400_that_names_them(client: OpenAI, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, **extra)
    assert str(refused.value.param).startswith(param)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_of_an_engine_that_cannot_force_it_is_a_400_for_tool_choice(
    client: OpenAI, choice: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, tools=[tool()], tool_choice=choice)
    assert refused.value.param == "tool_choice"


SCHEMAS: dict[str, dict[str, Any]] = {
    "choice": {"city": {"enum": ["Oslo", "Rome"]}},
    "number": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "several": {"on": {"type": "boolean"}, "kind": {"const": "x"}},
    "list": {"xs": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "reference": {"unit": {"$ref": "#/$defs/unit"}},
    "text": {"word": {"type": "string", "maxLength": 4}},
}


def schema_of(name: str) -> dict[str, Any]:
    properties = SCHEMAS[name]
    closed = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"$defs": {"unit": {"enum": ["C", "F"]}}, **closed} if name == "reference" else closed


@pytest.fixture(scope="module")
def long_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with room for tools in the prompt."""
    path = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(model_dir, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return path


@structuring
@pytest.mark.parametrize("choice", ["required", "named", "allowed"])
def test_every_required_call_parses_and_validates(
    serve: Serve, client_of: ClientOf, long_model: Path, choice: str
) -> None:
    """Random weights write random calls, which the constraint makes valid; every seed is another one."""
    spec = ServeSpec(name="tiny", model=str(long_model), engine={"num_blocks": 512, "max_running": 8, "device": "cpu"})
    client = client_of(serve(build_engine(spec), "tiny"))
    names = list(SCHEMAS)
    tools = [tool(name, schema_of(name)) for name in names]
    for seed in range(12):
        name = names[seed % len(names)]
        forced: Any = {
            "required": "required",
            "named": {"type": "function", "function": {"name": name}},
            "allowed": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool(name)]}},
        }[choice]
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            tools=tools,  # type: ignore[arg-type]
            tool_choice=forced,
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=60,
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), schema_of(call.function.name))
        assert choice == "required" or call.function.name == name
        assert answer.choices[0].finish_reason == ("stop" if choice == "named" else "tool_calls")
