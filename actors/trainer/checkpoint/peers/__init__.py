"""Snapshots in other ranks' memory (as in Gemini, SOSP 2023), which survive the loss of a node without storage."""
