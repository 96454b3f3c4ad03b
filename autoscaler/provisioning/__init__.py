"""Provisions new nodes for replicas and gang members that do not fit on existing nodes. Chooses the offerings to buy,
reserves resources on them, and reports the alternatives that were rejected.
"""
