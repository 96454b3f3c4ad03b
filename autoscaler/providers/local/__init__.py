"""Nodes that are processes on this machine, each a real raylet."""
