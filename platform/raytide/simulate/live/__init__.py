"""A forward simulation of a live cluster."""
