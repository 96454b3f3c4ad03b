"""Alerts: their states, what they do, and whom they tell."""
