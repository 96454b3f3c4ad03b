"""The telemetry that all processes share: metrics, their catalogue, traces, and the targets that Prometheus scrapes."""
