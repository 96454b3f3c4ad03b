"""Handles of endpoints, and the jobs that answer batches of requests."""
