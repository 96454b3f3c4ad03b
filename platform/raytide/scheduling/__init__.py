"""The placement simulation that the queue and the planner share: where shapes fit, at what cost, and why they do not
fit.
"""
