"""Guesses at next tokens, verified in the step that computes them: where from, how many, and whether at all."""
