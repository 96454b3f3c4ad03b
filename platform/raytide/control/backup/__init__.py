"""Backups of a cluster in a restic repository, restores and drills. A backup has the state, the configuration and the
folders that the state names."""
