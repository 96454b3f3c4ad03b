"""The tools of a chat request: the tools that the prompt shows, and the constraint on the output."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raytide.actors.engine.limits import MAX_GRAMMAR_CHARS
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.types import ChatFormat
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.fields.structure import constraint_field, structured_of
from raytide.actors.serving.openai_api.wire import AllowedToolsChoice, ChatRequest, NamedToolChoice, Tool
from raytide.actors.serving.tools.parser import OutputParser, ToolSyntax, syntax_of

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_MOST_CALLS = 32
"""The most calls in one answer to a request with `tool_choice: required`, which would otherwise never end."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use of tools in one request.

    `shown` are the tools in the form that chat templates take. `structured` constrains the output if a call is
    required, or if the request has both tools and a response format. Otherwise `structured` is None. `is_named` is true
    if the request forces one tool by its name.
    """

    shown: tuple[dict[str, Any], ...]
    syntax: ToolSyntax | None = None
    structured: Structured | None = None
    max_calls: int | None = None
    is_named: bool = False
    reasoning: Literal["", "tagged", "open"] = ""

    def parser(self) -> OutputParser | None:
        """Returns a new parser for one output. Returns None if outputs are plain text."""
        if self.syntax is None and not self.reasoning:
            return None
        functions = (tool["function"] for tool in self.shown)
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        return OutputParser(self.syntax, self.reasoning, self.max_calls, schemas)


NO_TOOLS = ToolUse(())


def tool_use_of(request: ChatRequest, chat: ChatFormat) -> ToolUse:
    """Returns the use of tools in a request. Raises ApiError (400) for invalid tools or an invalid choice."""
    tools, choice = list(request.tools or ()), request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice is only allowed when tools are specified.", param="tool_choice")
        return ToolUse((), reasoning=_reasoning(request, chat))
    _check(tools)
    if isinstance(choice, AllowedToolsChoice):
        allowed = {each.function.name for each in choice.allowed_tools.tools}
        if unknown := allowed - {tool.function.name for tool in tools}:
            raise invalid(f"tool_choice allows {sorted(unknown)[0]!r}, which is not in tools.", param="tool_choice")
        tools, choice = [tool for tool in tools if tool.function.name in allowed], choice.allowed_tools.mode
    if choice == "none":
        return ToolUse((), reasoning=_reasoning(request, chat))
    shown = tuple(tool.model_dump(mode="json", exclude_none=True) for tool in tools)
    most = 1 if request.parallel_tool_calls is False else None
    if choice in (None, "auto"):
        syntax, answer = syntax_of(chat.tools), structured_of(request)
        if answer is None or constraint_field(request) != "response_format":
            return ToolUse(shown, syntax, max_calls=most, reasoning=_reasoning(request, chat))
        assert isinstance(answer.spec, str), "a response format is a JSON schema"
        syntax, structured = _calls_or_answer(tools, json.loads(answer.spec), syntax, most or _MOST_CALLS)
        return ToolUse(shown, syntax, structured, most)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        named = next((tool for tool in tools if tool.function.name == name), None)
        if named is None:
            raise invalid(f"tool_choice names {name!r}, which is not in tools.", param="tool_choice")
        schema = json.dumps(_parameters(named))
        return ToolUse(shown, ToolSyntax("arguments", name=name), _constraint(schema), 1, is_named=True)
    schema = json.dumps(_any_call(tools, most or _MOST_CALLS))
    return ToolUse(shown, ToolSyntax("array", starts=("[",)), _constraint(schema), most)


def _reasoning(request: ChatRequest, chat: ChatFormat) -> Literal["", "tagged", "open"]:
    """Returns the format of the output's reasoning.

    A constraint applies from the first token on, so a constrained output has no reasoning. The exception is a regular
    expression or a grammar that contains the tag itself.
    """
    answer = structured_of(request)
    if answer is None or (answer.kind in ("regex", "grammar") and "think>" in str(answer.spec)):
        return chat.reasoning
    return ""


def _check(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        where, name = f"tools[{index}].function.name", tool.function.name
        if not _NAME.fullmatch(name):
            raise invalid(f"{where}: {name!r} is not made of 1 to 64 letters, digits, _ and -.", param=where)
        if name in seen:
            raise invalid(f"{where}: {name!r} is there twice.", param=where)
        seen.add(name)


def _parameters(tool: Tool) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, which are always an object."""
    schema = tool.function.parameters or {}
    return {"type": "object", **schema} if schema else {"type": "object", "maxProperties": 0}


def _any_call(tools: Sequence[Tool], most: int) -> dict[str, Any]:
    """Returns the schema of an array of up to `most` calls to any of the tools. Definitions that a tool's schema refers
    to are moved to the new schema's `$defs`.
    """
    calls = []
    definitions: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        parameters = _moved(_parameters(tool), f"tool{index}", definitions, param="tools")
        properties = {"name": {"const": tool.function.name}, "arguments": parameters}
        calls.append(
            {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}
    return {**schema, "$defs": definitions} if definitions else schema


def _calls_or_answer(
    tools: Sequence[Tool], answer: dict[str, Any] | bool, syntax: ToolSyntax, most: int
) -> tuple[ToolSyntax, Structured]:
    """Returns the constraint of an output that is either up to `most` calls or an answer of a schema, and the syntax of
    its calls.

    The model writes calls in the syntax of its template if that marks them in the text, so that it chooses between call
    and answer as it has learned to. Otherwise they are an array, because special tokens cannot be part of a grammar.
    """
    calls = _any_call(tools, most)
    if syntax.body == "tagged":  # no grammar for tagged arguments; hermes begins alike
        syntax = syntax_of("hermes")
    if syntax.body == "object" and syntax.end.startswith("</"):
        call = {**calls["items"], "$defs": calls.get("$defs", {})}
        written = "call" if most == 1 else f"call (ws call){{0,{most - 1}}}"
        grammar = (
            f"start: {written} | answer\n"
            f"call: {json.dumps(syntax.begin)} ws object ws {json.dumps(syntax.end)}\n"
            "ws: /\\n?/\n"
            f"object: %json {json.dumps({**call, 'x-guidance': _COMPACT})}\n"
            f"answer: %json {json.dumps(answer if isinstance(answer, bool) else {**answer, 'x-guidance': _COMPACT})}\n"
        )
        return syntax, _checked(Structured("grammar", grammar))
    definitions = calls.pop("$defs", {})
    if not isinstance(answer, bool):
        answer = _moved(answer, "answer", definitions, param="response_format")
    either = [calls, answer]
    return ToolSyntax("array", starts=("[{",)), _constraint(json.dumps({"anyOf": either, "$defs": definitions}))


def _moved(schema: dict[str, Any], prefix: str, definitions: dict[str, Any], *, param: str) -> dict[str, Any]:
    """Returns a copy of a schema for use inside a larger one, and adds its definitions to those of the larger one.
    Raises ApiError, which names the field `param`, if its definitions are not an object.
    """
    schema = {key: value for key, value in schema.items() if key != "$id"}  # it would change what references mean
    own: dict[str, Any] = {}
    for key in ("$defs", "definitions"):
        found = schema.pop(key, {})
        if not isinstance(found, dict):
            raise invalid(f"{key} of a schema is not an object.", param=param)
        for name, definition in found.items():
            own[f"{prefix}_{name}"] = _renamed(definition, prefix)
    moved: dict[str, Any] = _renamed(schema, prefix)
    if re.search(rf'"#/\$defs/{prefix}["/]', json.dumps([moved, own])):
        own[prefix] = moved
    definitions |= own
    return moved


def _renamed(schema: Any, prefix: str) -> Any:
    """Returns a copy of a schema whose references point into the whole schema. References to its own definitions
    become `$defs/PREFIX_NAME`; references to its other parts, as zod writes them, lead into `$defs/PREFIX`.
    """
    if isinstance(schema, dict):
        return {
            key: _moved_reference(value, prefix)
            if key == "$ref" and isinstance(value, str)
            else _renamed(value, prefix)
            for key, value in schema.items()
        }
    return [_renamed(each, prefix) for each in schema] if isinstance(schema, list) else schema


def _moved_reference(place: str, prefix: str) -> str:
    inside = re.sub(r"^#/(?:\$defs|definitions)/", f"#/$defs/{prefix}_", place)
    return re.sub(r"^#(?=/|$)", f"#/$defs/{prefix}", place) if inside == place else inside


def _constraint(schema: str) -> Structured:
    return _checked(Structured("json_schema", schema))


def _checked(structured: Structured) -> Structured:
    if structured.size > MAX_GRAMMAR_CHARS:
        raise invalid(
            f"the tools have schemas of {structured.size} characters; at most {MAX_GRAMMAR_CHARS} are taken.",
            param="tools",
        )
    return structured
