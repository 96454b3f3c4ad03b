"""Runs a client's checks one after the other and prints which features pass: `python CLIENT.py BASE_URL MODEL_DIR`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable

URL, MODEL_DIR = sys.argv[1:3]
KEYS: dict[str, str] = json.loads(os.environ["CLIENT_KEYS"])
"""The secrets of API keys by name; tests/clients/gateway.py says what each may do."""
_CHECKS: dict[str, Callable[[], object]] = {}


def feature(check: Callable[[], object]) -> Callable[[], object]:
    """Registers a check by its name."""
    _CHECKS[check.__name__.replace("_", " ")] = check
    return check


def run() -> None:
    """Ends the process with 1 if a check failed."""
    failed = 0
    for name, check in _CHECKS.items():
        try:
            check()
        except Exception:
            failed += 1
            sys.stdout.write(f"FAILED {name}\n{traceback.format_exc()[-30000:]}\n")
        else:
            sys.stdout.write(f"ok {name}\n")
    sys.exit(bool(failed))


def raises(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """Returns the error that the call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")
