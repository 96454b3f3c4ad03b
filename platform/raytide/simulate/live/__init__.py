"""Simulates how a live cluster will continue."""
