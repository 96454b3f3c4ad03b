"""The planner's calculations: the memory, time and cost of trainings and endpoints, and the parallel layouts that fit.

All functions are pure functions of numbers. Nothing here imports torch or Ray.
"""
