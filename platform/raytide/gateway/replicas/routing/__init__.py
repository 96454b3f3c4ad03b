"""Chooses a replica for each request, by the prefixes in each replica's cache and by the work in each replica's
queue.
"""
