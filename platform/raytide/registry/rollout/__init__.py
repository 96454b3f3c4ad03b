"""Rollouts as pure decisions: which revision answers whom, whether a new one may have more traffic, and which one wins.

Nothing here knows time, randomness or the network; callers give what they measured and apply what is decided.
"""
