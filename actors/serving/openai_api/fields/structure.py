"""The constraints on a request's output: OpenAI's `response_format`, or one of vLLM's equivalent fields."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from raytide.actors.engine.limits import MAX_GRAMMAR_CHARS
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.serving.openai_api.errors import invalid

ANY_OBJECT = '{"type": "object"}'

Schema = dict[str, Any] | str


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """The options of vLLM's field `structured_outputs`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Constraints(BaseModel):
    """The fields with which a request can constrain its output. Only one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def structured_of(request: Constraints) -> Structured | None:
    """Returns the constraint on the request's output. Returns None if there is none. Raises ApiError (400) for several
    constraints and for a constraint that is too long.
    """
    found = _found(request)
    for name, structured in found.items():
        if structured.size > MAX_GRAMMAR_CHARS:
            raise invalid(
                f"{name} has {structured.size} characters; at most {MAX_GRAMMAR_CHARS} are taken.",
                param=name.partition(".")[0],
            )
    if len(found) > 1:
        raise invalid(f"only one of {', '.join(found)} can be given.", param=constraint_field(request))
    return next(iter(found.values()), None)


def constraint_field(request: Constraints) -> str:
    """Returns the name of the first field that constrains the output. Returns an empty string if there is none."""
    return next(iter(_found(request)), "").partition(".")[0]


def _found(request: Constraints) -> dict[str, Structured]:
    asked = {
        "response_format": _of_format(request.response_format),
        "guided_json": _of_schema(request.guided_json),
        "guided_regex": request.guided_regex and Structured("regex", request.guided_regex),
        "guided_choice": request.guided_choice and Structured("choice", tuple(request.guided_choice)),
        "guided_grammar": request.guided_grammar and Structured("grammar", request.guided_grammar),
    }
    if outputs := request.structured_outputs:
        asked |= {
            "structured_outputs.json": _of_schema(outputs.json_),
            "structured_outputs.regex": outputs.regex and Structured("regex", outputs.regex),
            "structured_outputs.choice": outputs.choice and Structured("choice", tuple(outputs.choice)),
            "structured_outputs.grammar": outputs.grammar and Structured("grammar", outputs.grammar),
            "structured_outputs.json_object": Structured("json_schema", ANY_OBJECT) if outputs.json_object else None,
        }
    return {name: structured for name, structured in asked.items() if isinstance(structured, Structured)}


def _of_format(wanted: ResponseFormat | None) -> Structured | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        schema = (wanted.model_extra or {}).get("schema")
        if not isinstance(schema, dict | None):
            raise invalid("response_format.schema is not an object.", param="response_format.schema")
        return _of_schema(schema or ANY_OBJECT)
    if wanted.json_schema is None:
        raise invalid("response_format.json_schema is missing.", param="response_format.json_schema")
    schema = wanted.json_schema.schema_
    return Structured("json_schema", "{}" if schema is None else json.dumps(schema))


def _of_schema(schema: Schema | None) -> Structured | None:
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return Structured("json_schema", text)
