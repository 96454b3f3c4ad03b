"""Checks of this machine and of own machines. Each check says how to fix what it finds."""
