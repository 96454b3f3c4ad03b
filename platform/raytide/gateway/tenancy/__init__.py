"""The callers of the gateway: their keys, limits and budgets, and the cost of their requests."""
