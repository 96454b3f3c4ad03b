"""Checks whether this machine can run the Triton kernels, and registers the kernels. The module can be imported without
Triton.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import torch

from raytide.kernels.registry import register

_log = logging.getLogger(__name__)

Impl = TypeVar("Impl", bound=Callable[..., object])

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_KINDS = ("cuda", "rocm")
_PRIORITY = 20
_LEAST_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies
_WAVE = 64  # threads of a wavefront on the Instinct cards; other AMD cards have 32 and other matrix instructions
_PROCESSORS_OF_THE_INTERPRETER = 2


def is_installed() -> bool:
    """Returns whether Triton can be imported."""
    return find_spec("triton") is not None


@functools.cache
def can_run() -> bool:
    """Returns whether the kernels run on this machine's GPU. To find out, it launches a kernel, since Triton also needs
    a C compiler.
    """
    if not is_installed() or not torch.cuda.is_available():
        return False
    if torch.version.hip:
        if torch.cuda.get_device_properties().warp_size != _WAVE:
            return False
    elif torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        return False
    from raytide.kernels.triton.norm import rms_is_right

    try:
        return rms_is_right(torch.device("cuda"))
    except Exception as error:  # a compiler or driver of any kind may fail here, each with a type of its own
        detail = str(error).strip().splitlines()
        _log.warning("no GPU kernels, torch's operators are used instead: %s", detail[0] if detail else repr(error))
        return False


def gpu_variant(op: str, invariant: bool = False) -> Callable[[Impl], Impl]:
    """Returns a decorator that registers an implementation of `op` for CUDA and ROCm."""

    def remember(impl: Impl) -> Impl:
        for kind in _KINDS:
            register(op, kind, priority=_PRIORITY, probe=can_run, invariant=invariant)(impl)
        return impl

    return remember


@functools.cache
def num_processors(device: torch.device) -> int:
    """Returns the GPU's number of multiprocessors (CUDA) or compute units (ROCm)."""
    if device.type == "cpu":
        return _PROCESSORS_OF_THE_INTERPRETER
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def fits(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Returns whether all tensors have the same dtype and contiguous rows, and the kernels support this dtype."""
    given = [t for t in (x, *others) if t is not None]
    return x.dtype in DTYPES and all(t.dtype == x.dtype and t.stride(-1) == 1 for t in given)
