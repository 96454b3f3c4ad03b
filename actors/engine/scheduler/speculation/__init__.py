"""Guesses next tokens, which are verified in the step that computes them. It decides from which source, how many, and
whether any guess pays.
"""
