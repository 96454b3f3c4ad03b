"""Prometheus and Alertmanager beside a cluster: where they are, what they are configured to do, how they run."""
