"""Schemas as other languages' libraries write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.actors.engine.tiny import EOS, VOCAB, save_tokenizer
from tokenizers import Tokenizer

from raytide.actors.engine.backends.vllm.request import structured_fields
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.text.json_schemas import readable
from raytide.actors.engine.text.structured_output import GrammarCompiler

LARGEST = 1.7976931348623157e308


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def refers_to(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}", "$defs": {name: {"type": "integer", "maximum": 5}}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (refers_to("List[int]"), "5", "6"),
        (refers_to("Map<string, int>"), "5", "6"),
        (refers_to("Größe"), "5", "6"),
        (refers_to("用户"), "5", "6"),
        (refers_to("100%"), "5", "6"),
        (refers_to("A#1"), "5", "6"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "1300000000000000000", "1.5"),
        ({"type": "number", "minimum": -LARGEST, "maximum": LARGEST}, "-2.5", "true"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": LARGEST}, "2.5", "-1"),
    ],
)
def test_a_schema_is_compiled(tokenizer: Tokenizer, schema: dict[str, Any], right: str, wrong: str) -> None:
    pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")
    grammars = GrammarCompiler(tokenizer.to_str, VOCAB, [EOS])
    grammar = grammars.compile(Structured("json_schema", json.dumps(schema)))

    def is_allowed(text: str) -> bool:
        tokens = [*tokenizer.encode(text).ids, EOS]
        return grammar.state().allowed(tokens) == len(tokens)

    assert is_allowed(right) and not is_allowed(wrong)
    sent = json.loads(structured_fields(Structured("json_schema", json.dumps(schema)))["json"])
    assert sent == readable(schema) != schema
    text = f"start: value+ // %json or so\nvalue: %json {json.dumps(schema)} /x/\n"
    grammar = grammars.compile(Structured("grammar", text))
    assert is_allowed(f"{right}x{right}x") and not is_allowed(f"{wrong}x")
    sent = structured_fields(Structured("grammar", text))["grammar"]
    assert sent == text.replace(json.dumps(schema), json.dumps(readable(schema)))


def test_only_references_and_bounds_are_written_anew() -> None:
    schema = {
        "properties": {"$ref": {"const": {"$ref": "a b"}}, "minimum": {"type": "integer", "minimum": -5}, "enum": {}},
        "additionalProperties": False,
        "anyOf": [{"$ref": "#/$defs/a~1b%20c"}, True, {"exclusiveMinimum": True, "minimum": 2**70}],
        "enum": [{"$ref": "a b", "minimum": -(2**80)}],
        "$defs": {"a/b c": {"maximum": 10**18}},
    }
    assert readable(schema) == schema


@pytest.mark.parametrize("text", ["no schema", "[" * 5000])
def test_vllm_gets_what_is_no_schema_as_it_is(text: str) -> None:
    assert structured_fields(Structured("json_schema", text)) == {"json": text}
