"""Buys nodes from clouds through Ray's own node providers (AWS, GCP, Azure)."""
