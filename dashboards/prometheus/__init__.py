"""Prometheus and Alertmanager beside a cluster: finding, configuring and running them."""
