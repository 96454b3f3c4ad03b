"""The planner's calculations: the memory, time and cost of trainings and endpoints, and the layouts that fit.

Everything here is a pure function of numbers. Nothing imports torch or Ray.
"""
