"""Workflows: a file describes stages from text to an endpoint. `spec` defines the file, `planner` decides, `executor`
acts.
"""
