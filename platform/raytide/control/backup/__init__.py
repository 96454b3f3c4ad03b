"""Backs up a cluster to a restic repository, restores it, and tests restores in drills. A backup has the state, the
configuration and the folders that the state names."""
