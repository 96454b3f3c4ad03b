"""Rollouts as pure decisions: which revision answers a request, when a new revision gets more traffic, and which
revision wins.

Nothing here uses the clock, randomness or the network. Callers pass in measurements and carry out the decisions.
"""
