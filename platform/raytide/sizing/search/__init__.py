"""The search for training plans: possible layouts, the plans that use them, and the changes with which a
job would fit.
"""
