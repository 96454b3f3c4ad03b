"""Backups of a cluster in a restic repository, restores and drills. A backup contains the state store, the
configuration, and the folders that the state store names."""
