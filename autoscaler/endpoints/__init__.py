"""Endpoints: target replica counts, and the pools in which replicas are bought and released."""
