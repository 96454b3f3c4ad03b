"""Runs production decisions on recorded traces and a virtual clock, and compares them with baselines and lower
bounds."""
