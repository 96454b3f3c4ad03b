"""Metrics of training jobs, from the reports of their drivers."""

from raytide.core.telemetry.metrics import counter, gauge

_JOB = ("job", "team")

JOB_STEP = gauge("raytide_job_step", "Last step that a running job reported", *_JOB)
JOB_LOSS = gauge("raytide_job_loss", "Last loss that a running job reported", *_JOB)
JOB_LOSS_FINITE = gauge(
    "raytide_job_loss_finite", "0 if the last loss that a running job reported is NaN or infinite, else 1", *_JOB
)
JOB_TOKENS_PER_SECOND = gauge("raytide_job_tokens_per_second", "Training throughput", *_JOB)
JOB_MFU = gauge("raytide_job_mfu_ratio", "Model FLOPs utilization", *_JOB)
JOB_STEP_SECONDS = gauge("raytide_job_step_seconds", "Duration of a training step", *_JOB)
JOB_DATA_WAIT = gauge("raytide_job_data_wait_ratio", "Share of a step that waits for data", *_JOB)
JOB_SCALING = gauge(
    "raytide_job_scaling_ratio", "Throughput of a rank, as a share of that in the smallest gang that the run had", *_JOB
)
JOB_CHECKPOINT_AGE = gauge("raytide_job_checkpoint_age_seconds", "Age of the last checkpoint", *_JOB)
JOB_CHECKPOINT_FAILING = gauge(
    "raytide_job_checkpoint_failing", "1 if the last checkpoint of a running job could not be written", *_JOB
)
JOB_STRAGGLER = gauge(
    "raytide_job_straggler_ratio",
    "Time of the slowest rank's own part of a step, without waiting for others, over the median of the other ranks",
    *_JOB,
    "rank",
)
JOB_RESTARTS = counter(
    "raytide_job_restarts",
    "Restarts of a running job: of its driver, or of its gang since this driver began",
    *_JOB,
    "of",
)
JOB_LAST_STEP_AGE = gauge("raytide_job_last_step_age_seconds", "Time since the last reported step", *_JOB)
JOB_REPORT = gauge("raytide_job_report", "Last value of what a job reports itself", *_JOB, "name")
