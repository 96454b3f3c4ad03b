"""JSON columns: what cannot be stored is replaced when it is written, and what was stored can always be read."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from raytide.core.bounds import encodable

_SUSPECT = re.compile(r"\\u[dD][89a-fA-F]")
"""An escaped surrogate: one of a pair, mostly."""


def dumps(value: Any) -> str:
    """JSON text that every database takes: non-finite numbers become words, and texts are storable."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:  # a number that JSON has no word for
        text = json.dumps(_storable(value))
    return json.dumps(_storable(value)) if _SUSPECT.search(text) else text


def loads(stored: str | bytes) -> Any:
    """The stored value; None for one nested so deeply that it cannot be read."""
    text = stored if isinstance(stored, str) else stored.decode()
    try:
        value = json.loads(text)
    except RecursionError:
        return None
    return _storable(value) if _SUSPECT.search(text) else value


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {encodable(str(name)): _storable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(inner) for inner in value]
    return value
