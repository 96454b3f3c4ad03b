"""Simulates queue policies on recorded jobs, with baselines."""
