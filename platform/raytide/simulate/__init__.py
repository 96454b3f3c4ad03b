"""Runs raytide's production decisions on recorded traces with a virtual clock. Compares the results with the results of
baselines and with lower bounds.
"""
