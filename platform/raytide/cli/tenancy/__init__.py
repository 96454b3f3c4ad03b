"""The commands for quotas, budgets, costs, API keys and the audit log."""
