"""raytide: one elastic pool on which teams prepare data, train and serve language models.

The whole public API. Names load when they are first used, so that `import raytide` costs nothing: no torch, no ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytide.actors.engine import LLM, SamplingParams
    from raytide.core.errors import RaytideError
    from raytide.endpoint import EndpointHandle
    from raytide.job_run import Run
    from raytide.shortcuts import gang, run, scaling_config, task, train
    from raytide.tide import Tide, connect, local
    from raytide.train_run import TrainRun

__version__ = "0.1.0"

_HOMES = {
    "LLM": "raytide.actors.engine",
    "EndpointHandle": "raytide.endpoint",
    "RaytideError": "raytide.core.errors",
    "Run": "raytide.job_run",
    "SamplingParams": "raytide.actors.engine",
    "Tide": "raytide.tide",
    "TrainRun": "raytide.train_run",
    "connect": "raytide.tide",
    "gang": "raytide.shortcuts",
    "local": "raytide.tide",
    "run": "raytide.shortcuts",
    "scaling_config": "raytide.shortcuts",
    "task": "raytide.shortcuts",
    "train": "raytide.shortcuts",
}

__all__ = [
    "LLM",
    "EndpointHandle",
    "RaytideError",
    "Run",
    "SamplingParams",
    "Tide",
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
