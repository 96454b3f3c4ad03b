"""Quotas, budgets, costs and API keys: which team or key may use and spend how much."""
