"""Checkpoints: asynchronous saves, the manifests that commit them, and loading."""
