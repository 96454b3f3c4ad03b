"""JSON columns: unstorable values are replaced on writing, and every stored value can be read."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from raytide.core.bounds import encodable

_SUSPECT = re.compile(r"\\u[dD][89a-fA-F]")
"""An escaped surrogate, usually one of a valid pair."""


def dumps(value: Any) -> str:
    """Returns JSON text that every database accepts: non-finite numbers become strings, and texts are storable."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:  # NaN or infinity
        text = json.dumps(_storable(value))
    return json.dumps(_storable(value)) if _SUSPECT.search(text) else text


def loads(stored: str | bytes) -> Any:
    """Returns the stored value; None if it is nested too deeply to be read."""
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
