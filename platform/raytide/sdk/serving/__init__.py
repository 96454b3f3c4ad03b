"""Handles of endpoints, and the command of a batch of requests."""
