"""Bringing a cluster up and down: on this machine, on a cloud, and the wiring of its parts."""
