"""Tools beside a response format: an answer is a call, or a text of the format, as at OpenAI."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from tests.actors.engine.tiny import VOCAB, save_llama, save_tokenizer
from tests.actors.serving.test_native_engine import structuring
from tokenizers import Tokenizer

from raytide.actors.engine.text.structured_output import GrammarCompiler
from raytide.actors.engine.types import ChatFormat
from raytide.actors.serving.engines import build_engine
from raytide.actors.serving.openai_api.chat.tool_choice import tool_use_of
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.actors.serving.openai_api.fields.structure import structured_of
from raytide.actors.serving.openai_api.wire import ChatRequest
from raytide.core.objects.endpoint import ServeSpec

PLACE = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
}
DAY = {**PLACE, "$defs": {"city": {"enum": ["Monday", "Sunday"]}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "day", "schema": DAY, "strict": True}}
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
ONE = '{"name":"weather","arguments":{"city":"Oslo"}}'
CALLS = {
    "hermes": (f"<tool_call>\n{ONE}\n</tool_call>", f"<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>"),
    "llama3": (f"[{ONE}]", f"[{ONE},{ONE}]"),
    "mistral": (f"[{ONE}]", f"[{ONE},{ONE}]"),
    "deepseek": (f"[{ONE}]", f"[{ONE},{ONE}]"),
}


@pytest.mark.parametrize("wrong", [{"$defs": []}, {"definitions": 1}, {"$defs": None}])
def test_definitions_that_are_no_object_are_refused(wrong: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {**PLACE, **wrong}}}]
    form = {"type": "json_schema", "json_schema": {"name": "day", "schema": {**DAY, **wrong}}}
    for fields, param in (
        ({"tools": tools, "tool_choice": "required"}, "tools"),
        ({"tools": tools, "response_format": FORMAT}, "tools"),
        ({"response_format": form}, "response_format"),
    ):
        request = ChatRequest.model_validate({**ASK, **fields})
        with pytest.raises(ApiError, match="of a schema is not an object") as caught:
            tool_use_of(request, ChatFormat("llama3"))
        assert (caught.value.status, caught.value.body.error.param) == (400, param)


@structuring
@pytest.mark.parametrize("template", list(CALLS))
@pytest.mark.parametrize("parallel", [True, False])
def test_each_template_may_write_calls_or_the_format_and_nothing_else(
    tmp_path: Path, template: Any, parallel: bool
) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    request = ChatRequest.model_validate({**ASK, "response_format": FORMAT, "parallel_tool_calls": parallel})
    use = tool_use_of(request, ChatFormat(template))
    assert use.structured is not None
    grammar = GrammarCompiler(tokenizer.to_str, VOCAB, [0]).compile(use.structured)

    def is_allowed(text: str) -> bool:
        tokens = [*tokenizer.encode(text).ids, 0]
        return grammar.state().allowed(tokens) == len(tokens)

    one, two = CALLS[template]
    assert is_allowed(one) and is_allowed(two) is parallel
    assert is_allowed('{"city":"Sunday"}')
    for wrong in ("It rains.", '{"city":"Oslo"}', one.replace("Oslo", "Sunday"), one.replace("weather", "tide")):
        assert not is_allowed(wrong)
    for text in (one, two) if parallel else (one,):
        parser = use.parser()
        assert parser is not None
        pieces = [piece for character in text for piece in parser.feed(character)] + parser.finish()
        assert "".join(piece.text for piece in pieces).strip() == ""
        assert [piece.call.name for piece in pieces if piece.call and piece.call.id] == ["weather"] * text.count(ONE)
    parser = use.parser()
    assert parser is not None
    pieces = [piece for character in '{"city":"Sunday"}' for piece in parser.feed(character)] + parser.finish()
    assert "".join(piece.text for piece in pieces) == '{"city":"Sunday"}' and not any(piece.call for piece in pieces)


@structuring
@pytest.mark.parametrize("template", ["hermes", "llama3"])
@pytest.mark.parametrize(
    "asked",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"response_format": FORMAT},
    ],
)
def test_schemas_as_pydantic_and_zod_write_them_are_compiled(
    tmp_path: Path, template: Any, asked: dict[str, Any]
) -> None:
    """Formats of their own, `propertyNames` of records, an id, references to other parts of the schema."""
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    properties = {
        "file": {"type": "string", "format": "path"},
        "copy": {"$ref": "#/properties/file"},
        "day": {"type": "string", "format": "date"},
        "more": {"type": "array", "items": {"$ref": "#"}},
        "format": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
    }
    schema = {"type": "object", "properties": properties, "required": ["file", "copy"], "additionalProperties": False}
    schema["$id"] = "https://example.com/weather"
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    use = tool_use_of(ChatRequest.model_validate({**ASK, "tools": tools, **asked}), ChatFormat(template))
    assert use.structured is not None
    grammar = GrammarCompiler(tokenizer.to_str, VOCAB, [0]).compile(use.structured)
    begin, end = '[{"name":"weather","arguments":', "}]"
    if isinstance(asked.get("tool_choice"), dict):
        begin = end = ""
    elif template == "hermes" and "tool_choice" not in asked:
        begin, end = '<tool_call>{"name":"weather","arguments":', "}</tool_call>"

    def is_allowed(arguments: str) -> bool:
        tokens = [*tokenizer.encode(begin + arguments + end).ids, 0]
        return grammar.state().allowed(tokens) == len(tokens)

    inner = '{"file":"a","copy":"b","day":"2026-01-01"'
    assert is_allowed(f'{inner},"more":[{inner}}}],"format":{{"x":1}}}}')
    assert not is_allowed('{"file":"a","copy":1}')
    assert not is_allowed('{"file":"a","copy":"b","day":"soon"}')
    assert not is_allowed('{"file":"a","copy":"b","more":[{"file":"a"}]}')


def test_a_schema_beside_json_object_counts_as_elsewhere() -> None:
    """As in llama.cpp's and Together's APIs."""
    form = {"type": "json_object", "schema": PLACE}
    request = ChatRequest.model_validate({"model": "m", "messages": ASK["messages"], "response_format": form})
    found = structured_of(request)
    assert found is not None and isinstance(found.spec, str)
    assert json.loads(found.spec) == PLACE
    form["schema"] = "abc"
    with pytest.raises(ApiError, match="schema is not an object"):
        structured_of(ChatRequest.model_validate({**ASK, "model": "m", "response_format": form}))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    save_llama(folder, max_position_embeddings=4096)
    return folder


@pytest.fixture
def client(serve: Callable[..., str], client_of: Callable[[str], OpenAI], long_model: Path) -> OpenAI:
    spec = ServeSpec(name="tiny", model=str(long_model), engine={"num_blocks": 512, "max_running": 8, "device": "cpu"})
    return client_of(serve(build_engine(spec), "tiny"))


@structuring
@pytest.mark.parametrize("stream", [False, True])
def test_random_weights_call_or_answer_in_the_format(client: OpenAI, stream: bool) -> None:
    """Every seed is another output; among them are calls and answers."""
    kinds = set()
    for seed in range(24):
        ask = {**ASK, "response_format": FORMAT, "parallel_tool_calls": False, "max_tokens": 90, "seed": seed}
        if stream:
            with client.chat.completions.stream(**ask) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**ask).choices[0]
        if choice.message.tool_calls:
            (call,) = choice.message.tool_calls
            jsonschema.validate(json.loads(call.function.arguments), PLACE)
            assert choice.finish_reason == "tool_calls" and not choice.message.content
        else:
            jsonschema.validate(json.loads(choice.message.content or ""), DAY)
            assert choice.finish_reason == "stop"
        kinds.add(choice.finish_reason)
    assert kinds == {"tool_calls", "stop"}


@structuring
def test_a_required_call_needs_no_format(client: OpenAI) -> None:
    """instructor sends both over the Responses API."""
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        ask = {**ASK, "response_format": FORMAT, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 90}
        (call,) = client.chat.completions.create(**ask).choices[0].message.tool_calls or ()
        jsonschema.validate(json.loads(call.function.arguments), PLACE)
    tool = {"type": "function", **TOOLS[0]["function"]}  # type: ignore[dict-item]
    answer = client.responses.create(
        model="tiny",
        input="x",
        tools=[tool],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": "json_schema", "name": "day", "schema": DAY}},
        max_output_tokens=90,
    )
    assert [each.type for each in answer.output] == ["function_call"]


@structuring
def test_another_constraint_and_a_required_call_exclude_each_other(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="guided_regex"):
        client.chat.completions.create(**ASK, tool_choice="required", extra_body={"guided_regex": "a"})
    answer = client.chat.completions.create(**ASK, extra_body={"guided_regex": "a"})
    assert answer.choices[0].message.content == "a"


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS, "tool_choice": "none"}])
@pytest.mark.parametrize("asked", [{"response_format": FORMAT}, {"guided_choice": ["yes", "no"]}])
def test_a_constrained_answer_is_no_reasoning(tools: dict[str, Any], asked: dict[str, Any]) -> None:
    request = ChatRequest.model_validate({"model": "tiny", "messages": ASK["messages"], **tools, **asked})
    parser = tool_use_of(request, ChatFormat(reasoning="open")).parser()
    pieces = [] if parser is None else [*parser.feed("yes"), *parser.finish()]
    assert not any(piece.reasoning for piece in pieces)


def test_a_constraint_that_spells_the_reasoning_keeps_it() -> None:
    fields = {"model": "tiny", "messages": ASK["messages"], "guided_regex": "[a-z]+</think>yes"}
    assert tool_use_of(ChatRequest.model_validate(fields), ChatFormat(reasoning="open")).reasoning == "open"
