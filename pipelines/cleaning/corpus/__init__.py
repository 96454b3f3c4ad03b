"""Cleaning steps that compare documents with other documents. They find near-duplicates, repeated substrings, and
documents that overlap with evaluation sets.
"""
