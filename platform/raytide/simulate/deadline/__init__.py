"""Simulates deadline policies on recorded spot markets, with baselines and the optimum."""
