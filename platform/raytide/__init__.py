"""raytide: one elastic pool on which teams prepare data, train and serve language models.

This module is the whole public API. Each name is loaded when it is first used, so `import raytide` is cheap: it imports
neither torch nor ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytide.actors.engine import LLM, SamplingParams
    from raytide.core.errors import RaytideError
    from raytide.core.objects.endpoint import Replicas, ServeSpec
    from raytide.core.objects.gang import GangSpec, Shape
    from raytide.core.specs.data import DataSpec, TokenizerSpec
    from raytide.core.specs.model import ModelSpec
    from raytide.core.specs.parallelism import Parallelism
    from raytide.core.specs.train import OptimSpec, TrainSpec
    from raytide.sdk.client import Client, connect, local
    from raytide.sdk.jobs.flow_run import FlowRun
    from raytide.sdk.jobs.job_run import Run
    from raytide.sdk.jobs.progress import report
    from raytide.sdk.jobs.train_run import TrainRun
    from raytide.sdk.plan import plan
    from raytide.sdk.serving.endpoint import EndpointHandle
    from raytide.sdk.shortcuts import cost, data, flow, gang, jobs, run, scaling_config, serve, status, task, train

__version__ = "0.1.0"

_HOMES = {
    "raytide.actors.engine": ("LLM", "SamplingParams"),
    "raytide.core.errors": ("RaytideError",),
    "raytide.core.objects.endpoint": ("Replicas", "ServeSpec"),
    "raytide.core.objects.gang": ("GangSpec", "Shape"),
    "raytide.core.specs.data": ("DataSpec", "TokenizerSpec"),
    "raytide.core.specs.model": ("ModelSpec",),
    "raytide.core.specs.parallelism": ("Parallelism",),
    "raytide.core.specs.train": ("OptimSpec", "TrainSpec"),
    "raytide.sdk.client": ("Client", "connect", "local"),
    "raytide.sdk.plan": ("plan",),
    "raytide.sdk.serving.endpoint": ("EndpointHandle",),
    "raytide.sdk.jobs.flow_run": ("FlowRun",),
    "raytide.sdk.jobs.job_run": ("Run",),
    "raytide.sdk.jobs.progress": ("report",),
    "raytide.sdk.shortcuts": (
        *("cost", "data", "flow", "gang", "jobs", "run", "scaling_config", "serve", "status", "task", "train"),
    ),
    "raytide.sdk.jobs.train_run": ("TrainRun",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "Client",
    "DataSpec",
    "EndpointHandle",
    "FlowRun",
    "GangSpec",
    "ModelSpec",
    "OptimSpec",
    "Parallelism",
    "RaytideError",
    "Replicas",
    "Run",
    "SamplingParams",
    "ServeSpec",
    "Shape",
    "TokenizerSpec",
    "TrainRun",
    "TrainSpec",
    "__version__",
    "connect",
    "cost",
    "data",
    "flow",
    "gang",
    "jobs",
    "local",
    "plan",
    "report",
    "run",
    "scaling_config",
    "serve",
    "status",
    "task",
    "train",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'raytide' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
