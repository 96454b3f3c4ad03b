"""Checkpoints: asynchronous saves, manifests that commit them, the choice of one to resume from."""
