"""Grafana dashboards, generated from the metrics catalogue."""
