"""Serving policies on recorded requests and spot availability, beside baselines and the bound."""
