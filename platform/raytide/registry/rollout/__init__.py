"""Rollouts as pure decisions: which revision answers a request, whether a new revision gets more traffic, and which one
wins.

Nothing here uses the clock, randomness or the network; callers pass their measurements and apply the decisions.
"""
