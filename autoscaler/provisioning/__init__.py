"""New nodes for replicas and members that do not fit: which offerings are bought, what is reserved on them, and which
alternatives were rejected.
"""
