"""Alerts: their states, their actions and their receivers."""
