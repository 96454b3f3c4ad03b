"""Batches of requests: how the rows of a file are checked, run, recorded and returned in order."""
