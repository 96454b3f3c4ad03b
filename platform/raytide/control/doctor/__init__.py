"""Checks of this machine and of the operator's own machines. Each check that finds a problem says how to fix it."""
