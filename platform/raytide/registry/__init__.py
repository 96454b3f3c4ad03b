"""Registered models: the digest of their files, their lineage, and the differences of two versions."""
