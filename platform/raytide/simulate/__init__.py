"""Runs raytide's production decisions on recorded traces with a virtual clock. Compares them with baselines and lower
bounds.
"""
