"""Backs up a cluster to a restic repository, restores it, and tests restores in drills. A backup contains the state,
the configuration, and the folders whose paths are in the state.
"""
