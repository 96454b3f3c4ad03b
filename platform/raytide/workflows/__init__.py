"""Workflows: a file describes stages from raw text to an endpoint. `spec` defines the file, `planner` decides what to
do next, and `executor` does it.
"""
