"""Finds, configures and runs Prometheus and Alertmanager beside a cluster."""
