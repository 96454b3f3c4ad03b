"""Speculative decoding: from which source next tokens are guessed, how many, and whether guessing pays at all."""
