"""Required calls of tools with random schemas: whatever the weights write, its arguments parse and validate."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.types import ASGIApp
from tests.actors.engine.tiny import save_llama
from tests.actors.serving.asgi import ask
from tests.actors.serving.test_native_engine import structuring

from raytide.actors.engine import EngineConfig, NativeEngine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server

SCHEMAS, GENERATIONS, AT_ONCE = 50, 10, 16
SEED = 16


def value_schema(chance: random.Random, depth: int) -> dict[str, Any]:
    """Returns a schema whose values have bounded lengths: random weights end nothing by themselves."""
    simple: list[dict[str, Any]] = [
        {"enum": chance.sample(["Oslo", "Rome", "Kyiv", "\u00e5\u00df\u6771", 'a "b"', 7, None, True], 3)},
        {"type": "integer", "minimum": -chance.randrange(100), "maximum": chance.randrange(10_000)},
        {"type": "boolean"},
        {"type": "null"},
        {"const": chance.choice(["x", 1, "a\nb"])},
        {"type": "string", "maxLength": chance.randrange(1, 9)},
        {"type": "string", "pattern": chance.choice(["^[a-z]{2,5}$", "^\\d{4}-\\d{2}$", "^(yes|no)$"])},
        {"type": ["boolean", "null"]},
    ]
    if depth == 0 or chance.random() < 0.6:
        return chance.choice(simple)
    inner = [value_schema(chance, depth - 1) for _ in range(2)]
    return chance.choice(
        [
            {"type": "array", "items": inner[0], "minItems": chance.randrange(2), "maxItems": 3},
            {"anyOf": inner},
            object_schema(chance, depth - 1),
        ]
    )


def object_schema(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(
        ["city", "unit", "days ahead", "a-b", "\u00fc", "name", "arguments", "x.y"], chance.randrange(1, 5)
    )
    properties = {name: value_schema(chance, depth) for name in names}
    required = [name for name in names if chance.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def parameters(chance: random.Random) -> dict[str, Any]:
    schema = object_schema(chance, 2)
    if chance.random() < 0.3:
        schema["properties"]["ref"] = {"$ref": "#/$defs/shared"}
        schema["$defs"] = {"shared": value_schema(chance, 1)}
    return schema


async def calls(app: ASGIApp, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the functions that an answer calls, whole or out of the deltas of a stream."""
    answer = await ask(app, "/v1/chat/completions", json.dumps(body).encode())
    assert answer.status == 200, answer.body
    if not body["stream"]:
        choice = json.loads(answer.body)["choices"][0]
        assert choice["finish_reason"] == "tool_calls", (choice, body)
        return [call["function"] for call in choice["message"]["tool_calls"]]
    found: list[dict[str, Any]] = []
    assert answer.body.endswith(b"data: [DONE]\n\n"), answer.body[-500:]
    for line in answer.body.decode().split("\n\n"):
        if line and line != "data: [DONE]":
            for delta in json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("tool_calls") or ():
                if delta["index"] == len(found):
                    found.append({"name": delta["function"]["name"], "arguments": ""})
                found[delta["index"]]["arguments"] += delta["function"].get("arguments") or ""
    return found


@pytest.mark.timeout(1800)  # minutes of one processor, and those of a busy machine are longer
@structuring
async def test_required_calls_validate_whatever_the_schema(tmp_path: Path) -> None:
    save_llama(tmp_path, max_position_embeddings=8192)
    config = EngineConfig(model_dir=str(tmp_path), device="cpu", max_running=AT_ONCE, kv_memory_gb=0.2)
    server = Server(NativeEngine(config), model="m")
    await server.start()
    app, chance, places = create_app(server, owns_server=False), random.Random(SEED), asyncio.Semaphore(AT_ONCE)
    made = 0

    async def one(schemas: dict[str, dict[str, Any]], number: int) -> None:
        nonlocal made
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()
        ]
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "tools": tools,
            "tool_choice": "required",
            "parallel_tool_calls": number % 3 == 0,
            "seed": number,
            "stream": number % 2 == 1,
            "max_tokens": 4000,
        }
        async with places:
            found = await calls(app, body)
        assert len(found) == 1 or (found and body["parallel_tool_calls"])
        for call in found:
            jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
        made += 1

    drawn = [{f"tool_{index}": parameters(chance) for index in range(chance.randrange(1, 4))} for _ in range(SCHEMAS)]
    try:
        async with asyncio.TaskGroup() as group:
            for schemas in drawn:
                for number in range(GENERATIONS):
                    group.create_task(one(schemas, number))
    finally:
        await server.stop()
    assert made == SCHEMAS * GENERATIONS
