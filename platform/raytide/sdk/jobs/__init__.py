"""Handles of jobs, training runs, scripts and tasks."""
