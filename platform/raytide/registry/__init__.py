"""Registered models: the digest of their files, their lineage, and the differences between versions."""
