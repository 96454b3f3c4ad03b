"""Tenancy in the state store: API keys, their spending and usage, and the audit log."""
