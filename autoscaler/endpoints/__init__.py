"""Endpoints: the target numbers of replicas, and the pools in which replicas are bought and released."""
