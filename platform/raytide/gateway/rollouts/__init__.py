"""Rollouts in the gateway: which revision answers a request, and what is counted of both."""
