"""Queries on jobs, leases and the ledger, and those of the web page."""
