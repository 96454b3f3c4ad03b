"""Checks of this machine and of own machines, each with how to fix it."""
