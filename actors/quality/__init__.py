"""Measures the quality of a model compared with its parent: divergence, loss and task results. A gate sets limits for
these metrics.
"""
