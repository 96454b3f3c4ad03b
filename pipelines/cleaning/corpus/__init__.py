"""Cleaning steps that compare documents with others: near-duplicates, repeated substrings and evaluation sets."""
