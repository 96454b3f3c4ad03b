"""Brings clusters up and down, on this machine or on a cloud, and wires their parts together."""
