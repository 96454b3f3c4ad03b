"""Interruption notices of clouds. A cloud notifies only the machine itself, so a watcher on each node passes notices
on.
"""
