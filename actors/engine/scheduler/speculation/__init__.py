"""Guesses next tokens, which a step verifies: from which source, how many, and whether guesses pay at all."""
