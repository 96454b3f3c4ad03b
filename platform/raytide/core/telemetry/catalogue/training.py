"""Metrics of training jobs, from what their drivers report."""

from raytide.core.telemetry.metrics import Metric

_JOB = ("job", "team")

JOB_STEP = Metric("raytide_job_step", "gauge", "Last step that a running job reported", "training", labels=_JOB)
JOB_LOSS = Metric("raytide_job_loss", "gauge", "Last loss that a running job reported", "training", labels=_JOB)
JOB_TOKENS_PER_SECOND = Metric(
    "raytide_job_tokens_per_second", "gauge", "Training throughput", "training", "tokens", _JOB
)
JOB_MFU = Metric("raytide_job_mfu_ratio", "gauge", "Model FLOPs utilization", "training", "ratio", _JOB)
JOB_STEP_SECONDS = Metric(
    "raytide_job_step_seconds", "gauge", "Duration of a training step", "training", "seconds", _JOB
)
JOB_DATA_WAIT = Metric(
    "raytide_job_data_wait_ratio", "gauge", "Share of a step that waits for data", "training", "ratio", _JOB
)
JOB_SCALING = Metric(
    "raytide_job_scaling_ratio",
    "gauge",
    "Throughput of a rank, as a share of that in the smallest gang that the run had",
    "training",
    "ratio",
    _JOB,
)
JOB_CHECKPOINT_AGE = Metric(
    "raytide_job_checkpoint_age_seconds", "gauge", "Age of the last checkpoint", "training", "seconds", _JOB
)
JOB_RESTARTS = Metric("raytide_job_restarts", "counter", "Restarts of a running job", "training", labels=_JOB)
JOB_LAST_STEP_AGE = Metric(
    "raytide_job_last_step_age_seconds", "gauge", "Time since the last reported step", "training", "seconds", _JOB
)
JOB_REPORT = Metric(
    "raytide_job_report", "gauge", "Last value of what a job reports itself", "training", labels=(*_JOB, "name")
)
