"""Simulates recorded jobs under a queue policy, for a window of days and a cluster size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from raytide.core.errors import UsageError
from raytide.simulate.jobs import trace as job_trace
from raytide.simulate.jobs.baselines import BASELINES
from raytide.simulate.jobs.cluster import QueuePolicy, replay
from raytide.simulate.jobs.raytide import RAYTIDE

LEAST_LOAD, MOST_LOAD = 1e-4, 1e4
"""The bounds of the load, which catch typing errors."""
POLICIES: dict[str, QueuePolicy] = {"raytide": RAYTIDE, **BASELINES}


@dataclass(frozen=True, slots=True)
class Setting:
    window: str = "busiest"
    """`busiest`, or the number of the first day."""
    days: int = 14
    gpus: int | None = None
    load: float | None = None
    """The jobs' GPU-hours divided by the cluster's in the window, from which the cluster is sized; None if its size is
    given.
    """
    policy: str = "raytide"
    multi_gpu_share: float = 0.0
    seed: int = 0


def simulate(path: Path, setting: Setting) -> dict[str, object]:
    """Runs the simulation. Returns its settings and outcome as a JSON object."""
    _check(setting)
    trace = job_trace.window(job_trace.read(path), _first_day(setting.window), setting.days)
    mixed = job_trace.with_multi_gpu_share(trace, setting.multi_gpu_share, setting.seed)
    if setting.gpus is not None:
        load = trace.gpu_s / (setting.gpus * setting.days * job_trace.DAY_S)
        gpus = setting.gpus if mixed is trace else job_trace.gpus_for(mixed, load, setting.days)
    else:
        load = setting.load or 0.0
        gpus = job_trace.gpus_for(mixed, load, setting.days)
    if (largest := int(mixed.gpus.max())) > gpus:
        raise UsageError(
            f"a job asks for {largest} GPUs and the cluster has {gpus}.", hint="Raise --gpus to at least that."
        )
    outcome = replay(mixed, gpus, POLICIES[setting.policy], setting.days)
    return {**asdict(setting), "jobs": len(mixed), "load": load, **asdict(outcome)}


def _check(setting: Setting) -> None:
    if setting.policy not in POLICIES:
        raise UsageError(f"no queue policy {setting.policy!r}.", hint=f"There are: {', '.join(POLICIES)}.")
    if (setting.gpus is None) == (setting.load is None):
        raise UsageError("the size of the cluster is not clear.", hint="Give either --gpus or --load.")
    if setting.days < 1 or (setting.gpus is not None and setting.gpus < 1) or setting.seed < 0:
        raise UsageError("--days and --gpus are above zero, and --seed is not below it.")
    if setting.load is not None and not LEAST_LOAD <= setting.load <= MOST_LOAD:
        raise UsageError(f"--load is {setting.load:g}.", hint=f"It lies within {LEAST_LOAD:g} and {MOST_LOAD:g}.")
    if not 0 <= setting.multi_gpu_share <= 1:
        raise UsageError(f"--multi-gpu-share is {setting.multi_gpu_share:g}.", hint="It lies within 0 and 1.")


def _first_day(window: str) -> int | None:
    if window == "busiest":
        return None
    if not (window.isascii() and window.isdigit()):
        raise UsageError(f"--window is {window!r}.", hint="It is `busiest` or the number of the first day.")
    return int(window)
