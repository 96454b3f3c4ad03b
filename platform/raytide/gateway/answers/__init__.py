"""Answers that need not be computed again: those that are in computation for an equal request, and cached ones."""
