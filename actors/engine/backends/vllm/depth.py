"""Refuses structured outputs that are nested so deeply that vLLM's process would die. llguidance, which compiles them
there, recurses along the references of a schema and the rules of a grammar, until the stack overflows.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote

from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.text.json_schemas import split_schemas
from raytide.core.errors import UsageError

_MOST_LEVELS = 800
"""llguidance compiles 1000 levels of schemas on 8 MB of stack, but not 2000. A rule takes half of a level's."""
_MOST_BRACKETS = 25
"""The deepest nesting inside one rule that llguidance takes."""
_MOST_VALUES = 1 << 17
"""The most values that are visited: many references may lead to large parts of the same schema."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NO_SCHEMAS = ("enum", "const", "default", "examples")
_OF_NAMES = ("properties", "patternProperties", "dependentSchemas")


def check_depth(structured: Structured) -> None:
    """Raises UsageError for a JSON schema or a grammar that may be nested too deeply."""
    if structured.kind == "json_schema":
        levels = _schema_levels(_parsed(str(structured.spec)))
    elif structured.kind == "grammar":
        levels = _grammar_levels(str(structured.spec))
    else:
        return
    if levels > _MOST_LEVELS:
        raise UsageError(
            f"the {structured.kind} of structured output is nested too deeply: up to {levels} levels.",
            hint=f"Use at most {_MOST_LEVELS} levels in all its definitions together.",
        )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None  # vLLM refuses it itself


def _schema_levels(root: Any) -> int:
    """Returns the sum of the depths of a schema and of all that it refers to: no chain of references is longer."""
    levels, size, seen, todo = 0, 0, {"#"}, [root]
    while todo and size <= _MOST_VALUES:
        depth, count, references = _inline(todo.pop(), root)
        if any(not reference.startswith("#/") and reference != "#" for reference in references):
            return json.dumps(root).count("{")  # references by names: each schema may refer to any other
        levels, size = levels + depth, size + count
        todo += [_target(root, reference) for reference in references - seen]
        seen |= references
    return max(levels, size) if todo else levels


def _inline(schema: Any, root: Any) -> tuple[int, int, set[str]]:
    """Returns the depth and the number of values of a schema without what it refers to, and its references. The `$id`
    of a schema inside `root` counts as a reference, because it changes what references inside that schema mean.
    """
    deepest, count, references, todo = 0, 0, set[str](), [(schema, 0, False)]
    while todo:
        value, depth, is_map = todo.pop()
        count += 1
        if isinstance(value, list):
            todo += [(each, depth, False) for each in value]
        elif isinstance(value, dict):
            depth += not is_map
            deepest = max(deepest, depth)
            for key, inner in value.items():
                if is_map:
                    todo.append((inner, depth, False))
                elif isinstance(inner, str):
                    if key in _REFERENCES or (key in ("$id", "id") and value is not root):
                        references.add(inner)
                elif key not in (_NO_SCHEMAS if value is not root else (*_NO_SCHEMAS, "$defs", "definitions")):
                    todo.append((inner, depth, key in _OF_NAMES and isinstance(inner, dict)))
    return deepest, count, references


def _target(root: Any, reference: str) -> Any:
    found = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _grammar_levels(text: str) -> int:
    """Returns half the sum of the depths of all rules, plus the levels of the schemas inside the grammar."""
    texts, schemas = split_schemas(text)
    bodies = re.split(":+", "".join(texts))
    brackets = (min(_MOST_BRACKETS, len(re.findall(r"[(\[{]", body))) for body in bodies)
    return sum(map(_schema_levels, schemas)) + (len(bodies) + sum(brackets)) // 2
