"""Pruning: parts of a model are removed, or weights are set to zero."""
