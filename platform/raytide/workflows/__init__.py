"""Workflows: one file of stages, from text to an endpoint. `planner` decides, `executor` acts, `spec` is the file."""
