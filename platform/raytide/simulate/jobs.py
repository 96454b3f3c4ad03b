"""Recorded jobs under a queue policy by name: the window, the cluster's size, and what came of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from raytide.core.errors import NotFoundError, UsageError
from raytide.simulate import job_trace
from raytide.simulate.cluster_jobs import Policy, replay
from raytide.simulate.job_baselines import BASELINES
from raytide.simulate.job_raytide import RAYTIDE

POLICIES: dict[str, Policy] = {"raytide": RAYTIDE, **BASELINES}


@dataclass(frozen=True, slots=True)
class Setting:
    window: str = "busiest"
    """`busiest`, or the number of the first day."""
    days: int = 14
    gpus: int | None = None
    load: float | None = None
    """GPU-hours of the jobs over those of the cluster in the window; sizes the cluster."""
    policy: str = "raytide"
    multi_gpu_share: float = 0.0
    seed: int = 0


def simulate(path: Path, setting: Setting) -> dict[str, object]:
    """The setting and the outcome, as JSON."""
    if setting.policy not in POLICIES:
        raise NotFoundError(f"no queue policy {setting.policy!r}.", hint=f"There are: {', '.join(POLICIES)}.")
    if (setting.gpus is None) == (setting.load is None):
        raise UsageError("give the cluster's size either as --gpus or as --load.")
    if setting.days < 1 or (setting.load is not None and setting.load <= 0) or not 0 <= setting.multi_gpu_share <= 1:
        raise UsageError("days and load must be above zero, and the share of multi-GPU jobs within 0 and 1.")
    trace = job_trace.window(job_trace.read(path), _first_day(setting.window), setting.days)
    mixed = job_trace.with_multi_gpu_share(trace, setting.multi_gpu_share, setting.seed)
    if setting.gpus is not None:
        load = trace.gpu_s / (setting.gpus * setting.days * job_trace.DAY_S)
        gpus = setting.gpus if mixed is trace else job_trace.gpus_for(mixed, load, setting.days)
    else:
        load = setting.load or 0.0
        gpus = job_trace.gpus_for(mixed, load, setting.days)
    if (largest := int(mixed.gpus.max())) > gpus:
        raise UsageError(f"a job asks for {largest} GPUs and the cluster has {gpus}.", hint="Give it more.")
    outcome = replay(mixed, gpus, POLICIES[setting.policy], setting.days)
    return {**asdict(setting), "jobs": len(mixed), "load": load, **asdict(outcome)}


def _first_day(window: str) -> int | None:
    if window == "busiest":
        return None
    if not window.isdigit():
        raise UsageError(f"--window {window}: it is `busiest` or the number of a day.")
    return int(window)
