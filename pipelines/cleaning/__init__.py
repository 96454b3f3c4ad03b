"""Cleaning of text: rules for single documents, near-duplicates, repeated substrings, overlap with evaluation sets, and
reports of dropped documents.
"""
