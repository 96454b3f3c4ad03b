"""Clouds through Ray's own node providers (AWS, GCP, Azure)."""
