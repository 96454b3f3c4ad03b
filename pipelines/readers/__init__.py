"""Readers of the input formats. Each yields the records of a file in file order."""
