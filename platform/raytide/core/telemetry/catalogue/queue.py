"""Metrics of jobs and leases in the queue."""

from raytide.core.telemetry.metrics import gauge

JOBS = gauge("raytide_jobs", "Unfinished jobs by kind, team and state", "kind", "team", "state")
LEASE_MEMBERS = gauge("raytide_lease_members", "Members of leases in use, by state", "state")
GANG_PENDING = gauge(
    "raytide_gang_pending_seconds", "Time that a job has waited for its gang; the 5 longest", "job", "team"
)
