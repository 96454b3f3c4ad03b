"""Constraints of which vLLM would die are refused before it sees them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from raytide.actors.engine import GenRequest, SamplingParams, Structured
from raytide.actors.engine.backends.vllm.request import check_request
from raytide.core.errors import UsageError


def nested(inner: Any, levels: int) -> Any:
    for _ in range(levels):
        inner = {"items": inner}
    return inner


def chain(length: int, levels: int = 1, **more: Any) -> dict[str, Any]:
    """Returns a schema of definitions, each of which refers to the next."""
    definitions = {f"a{place}": nested({"$ref": f"#/$defs/a{place + 1}"}, levels) for place in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{length}": more or {"type": "integer"}}}


def named(length: int) -> dict[str, Any]:
    definitions = {f"a{place}": {"$id": f"a{place}", "items": {"$ref": f"a{place + 1}"}} for place in range(length)}
    return {"$ref": "a0", "$defs": {**definitions, f"a{length}": {"$id": f"a{length}"}}}


def hidden(length: int) -> dict[str, Any]:
    """Returns a chain in a place for other things, along properties with the names of keywords."""
    kept = [nested({"properties": {"definitions": {"$ref": f"#/default/{place + 1}"}}}, 20) for place in range(length)]
    return {"$ref": "#/default/0", "default": [*kept, {}]}


def refused(kind: Any, spec: Any) -> bool:
    text = spec if isinstance(spec, str) else json.dumps(spec)
    request = GenRequest(request_id="r", prompt=[1], sampling=SamplingParams(structured=Structured(kind, text)))
    try:
        check_request(request)
    except UsageError as error:
        return "nested too deeply" in str(error)
    return False


def rules(length: int, body: str = "{}") -> str:
    lines = [f"r{place}: {body.format(f'r{place + 1}')}" for place in range(length)]
    return "\n".join(["start: r0", *lines, f'r{length}: "a"'])


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("json_schema", chain(1000)),
        ("json_schema", chain(20, levels=50)),
        ("json_schema", named(1000)),
        ("json_schema", hidden(60)),
        ("grammar", rules(4000)),
        ("grammar", rules(500, '((((((({} "x")))))))')),
        ("grammar", "root ::= " + " ".join(f"r{place} r{place} ::= " for place in range(2000)) + '"a"'),
        ("grammar", f"start: %json {json.dumps(chain(1000))}\n"),
    ],
)
def test_a_chain_that_overflows_the_stack_is_refused(kind: str, spec: Any) -> None:
    assert refused(kind, spec)


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "boss": {"anyOf": [{"$ref": "#"}, {}]}}}


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("json_schema", "no schema"),
        ("json_schema", "true"),
        ("json_schema", chain(250)),
        ("json_schema", named(100)),
        ("json_schema", {**PERSON, "$id": "https://example.com/person", "default": {"id": "1"}}),
        ("json_schema", {"properties": {f"p{place}": PERSON for place in range(300)}}),
        ("json_schema", {"$ref": "#/missing/0/x", "$defs": {}}),
        ("grammar", rules(500, '{} ("," "x")?')),
        ("grammar", f"start: %json {json.dumps(PERSON)}\n"),
        ("regex", "a" * 5000),
        ("choice", ("a" * 5000,)),
    ],
)
def test_what_clients_send_is_taken(kind: str, spec: Any) -> None:
    if kind == "choice":
        check_request(
            GenRequest(request_id="r", prompt=[1], sampling=SamplingParams(structured=Structured("choice", spec)))
        )
    else:
        assert not refused(kind, spec)


def test_the_parts_of_a_schema_are_not_looked_at_again_and_again() -> None:
    """Each spelling of a reference to the same large part counts, but only so many."""
    large = {"properties": {f"p{place}": {} for place in range(3000)}}
    names = ["".join(each) for each in itertools.product(*((char, f"%{ord(char):x}") for char in "largest"))]
    schema = {"anyOf": [{"$ref": f"#/x/{name}"} for name in names], "x": {"largest": large}}
    assert refused("json_schema", schema)
    assert not refused("json_schema", {**schema, "anyOf": schema["anyOf"][:20]})
