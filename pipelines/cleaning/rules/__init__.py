"""Cleaning rules that use only a document's text. Each rule returns the reason to drop the document, or None to keep
it.
"""
