"""Snapshots of the training state in the memory of other ranks (as in Gemini, SOSP 2023). They survive the loss of a
node and need no storage.
"""
