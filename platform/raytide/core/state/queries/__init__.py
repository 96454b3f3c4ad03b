"""Queries on jobs, leases and the ledger."""
