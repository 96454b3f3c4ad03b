"""Fewer weights: cut out of the model, or set to zero."""
