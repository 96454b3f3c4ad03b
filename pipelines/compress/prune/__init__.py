"""Pruning: weights are cut out of the model, or set to zero."""
