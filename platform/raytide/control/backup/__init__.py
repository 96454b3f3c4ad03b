"""Backups of a cluster in a restic repository: state, configuration and what the state names; restores and drills."""
