"""Speculative decoding: the sources that guess the next tokens, the number of tokens to guess, and the decision whether
guessing pays at all.
"""
