"""Readers of input formats. Each reader yields the records of a file in the file's order."""
