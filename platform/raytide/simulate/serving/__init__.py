"""Simulates serving policies on recorded requests and recorded spot availability, with baselines and a lower bound."""
