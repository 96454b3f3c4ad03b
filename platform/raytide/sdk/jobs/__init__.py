"""Handles of jobs, training runs, workflows, scripts and tasks."""
