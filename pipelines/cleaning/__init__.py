"""Cleaning of text: rules by document, near-duplicates, repeated substrings, evaluation sets, and reports of drops."""
