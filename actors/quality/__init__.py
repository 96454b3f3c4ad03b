"""Measures the quality of a model compared with its parent: divergence, loss and tasks, and a gate that sets limits for
them.
"""
