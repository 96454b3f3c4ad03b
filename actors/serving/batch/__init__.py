"""Batches of requests from a file: its rows are checked, run and recorded, and the results are returned in order."""
