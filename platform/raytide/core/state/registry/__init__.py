"""Registered models in the state store, and the revisions of endpoints."""
