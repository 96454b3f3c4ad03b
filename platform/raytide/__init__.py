"""raytide: one elastic pool on which teams prepare data, train and serve language models.

The whole public API. Names load when they are first used, so that `import raytide` costs nothing: no torch, no ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytide.actors.engine import LLM, SamplingParams
    from raytide.core.errors import RaytideError
    from raytide.sdk.client import Client, connect, local
    from raytide.sdk.endpoint import EndpointHandle
    from raytide.sdk.job_run import Run
    from raytide.sdk.shortcuts import gang, run, scaling_config, task, train
    from raytide.sdk.train_run import TrainRun

__version__ = "0.1.0"

_HOMES = {
    "LLM": "raytide.actors.engine",
    "EndpointHandle": "raytide.sdk.endpoint",
    "RaytideError": "raytide.core.errors",
    "Run": "raytide.sdk.job_run",
    "SamplingParams": "raytide.actors.engine",
    "Client": "raytide.sdk.client",
    "TrainRun": "raytide.sdk.train_run",
    "connect": "raytide.sdk.client",
    "gang": "raytide.sdk.shortcuts",
    "local": "raytide.sdk.client",
    "run": "raytide.sdk.shortcuts",
    "scaling_config": "raytide.sdk.shortcuts",
    "task": "raytide.sdk.shortcuts",
    "train": "raytide.sdk.shortcuts",
}

__all__ = [
    "LLM",
    "Client",
    "EndpointHandle",
    "RaytideError",
    "Run",
    "SamplingParams",
    "TrainRun",
    "__version__",
    "connect",
    "gang",
    "local",
    "run",
    "scaling_config",
    "task",
    "train",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'raytide' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
