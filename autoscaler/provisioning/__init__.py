"""Provisions new nodes for replicas and gang members that do not fit on existing nodes. Chooses the offerings to buy,
what is reserved on them, and which alternatives to report as rejected.
"""
