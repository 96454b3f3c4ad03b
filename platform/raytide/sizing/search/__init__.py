"""The search for training plans: the possible layouts, the plans that use them, and the changes that would make a job
fit.
"""
