"""Turns whatever one request's work raises into an error of that request."""

from __future__ import annotations

import asyncio

__all__ = ["contained"]

_NOT_A_FAULT = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


def contained(error: BaseException) -> Exception:
    """Returns the error that the request at fault ends with.

    A panic in a Rust library (tokenizers, llguidance) arrives as a BaseException that is no Exception: it is wrapped in
    a RuntimeError. What asks a thread or task to end is raised again.
    """
    if isinstance(error, _NOT_A_FAULT):
        raise error
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
