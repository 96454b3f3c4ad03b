"""Nodes as processes on this machine, each with a real raylet."""
