"""Handles of endpoints, and jobs that answer batches of requests."""
