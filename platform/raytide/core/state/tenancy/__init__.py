"""Tenancy in the state store: API keys, what they spent, their usage, and the audit log."""
