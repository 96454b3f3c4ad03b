"""Deadline policies on recorded spot prices, beside baselines and the optimum."""
