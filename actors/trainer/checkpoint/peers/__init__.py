"""Snapshots in the memory of other ranks, which survive the loss of a node without the disk."""
