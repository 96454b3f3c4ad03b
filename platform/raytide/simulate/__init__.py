"""Runs production decisions on recorded traces and a virtual clock, with baselines and lower bounds for comparison."""
