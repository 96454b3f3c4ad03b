"""The placement simulation that the queue and the planner share. It finds where shapes fit and at what cost, or why
they do not fit.
"""
