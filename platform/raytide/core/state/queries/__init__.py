"""Queries on jobs, leases and the ledger, and the queries of the web page."""
