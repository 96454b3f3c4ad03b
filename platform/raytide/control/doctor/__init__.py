"""Checks of this machine and of the operator's own machines. Each check says how to fix what it finds."""
