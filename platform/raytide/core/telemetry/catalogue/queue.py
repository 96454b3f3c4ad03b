"""Metrics of jobs and leases in the queue."""

from raytide.core.telemetry.metrics import Metric

JOBS = Metric(
    "raytide_jobs", "gauge", "Unfinished jobs by kind, team and state", "queue", labels=("kind", "team", "state")
)
LEASE_MEMBERS = Metric(
    "raytide_lease_members", "gauge", "Members of leases in use, by state", "queue", labels=("state",)
)
GANG_PENDING = Metric(
    "raytide_gang_pending_seconds",
    "gauge",
    "Time that a job has waited for its gang; the 5 longest",
    "queue",
    "seconds",
    ("job", "team"),
)
