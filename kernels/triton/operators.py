"""Registers the GPU operators if Triton is installed. Otherwise registers nothing, and torch's operators are used."""

from __future__ import annotations

import importlib

from raytide.kernels.triton.support import is_installed

_MODULES = ("attention", "feed_forward", "norm", "quantized_linear", "rope_write")

if is_installed():
    for _module in _MODULES:
        importlib.import_module(f"raytide.kernels.triton.{_module}")
