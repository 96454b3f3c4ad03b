"""Gangs on Ray: one detached placement group per member of a lease, and what user code sees of its lease."""
