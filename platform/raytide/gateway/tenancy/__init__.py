"""The callers of the gateway: their API keys, rate limits and budgets, and the cost of their requests."""
