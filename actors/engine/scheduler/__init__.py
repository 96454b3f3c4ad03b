"""The scheduler of the native engine. It decides which sequences run in the next step, which wait and which are
preempted.
"""
