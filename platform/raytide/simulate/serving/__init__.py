"""Serving policies on recorded requests and spot availability, with baselines and a lower bound."""
