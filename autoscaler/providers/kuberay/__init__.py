"""Kubernetes through KubeRay."""
