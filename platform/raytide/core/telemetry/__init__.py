"""Telemetry that every process shares: metrics, their catalogue, and the targets that Prometheus scrapes."""
