"""raytide's queue in the simulator: the production order over the simulated jobs."""

from __future__ import annotations

from raytide.jobs.order import NEW_GPU_S, SHORT_GPU_S, Claims, holders
from raytide.simulate.cluster_jobs import Ints, Policy, Queue
from raytide.simulate.job_baselines import next_band_s


def pick(queue: Queue) -> Ints:
    active = queue.active
    claims = Claims(
        gpus=queue.gpus[active],
        submitted_s=queue.submit_s[active],
        attained_gpu_s=queue.attained_gpu_s[active],
        held_s=queue.held_s[active],
        queued_s=queue.now_s - queue.submit_s[active] - queue.held_s[active],
    )
    return active[holders(claims, queue.gpus_total)]


RAYTIDE = Policy(pick, preempts=True, wake_s=lambda queue: next_band_s(queue, (NEW_GPU_S, SHORT_GPU_S)))
