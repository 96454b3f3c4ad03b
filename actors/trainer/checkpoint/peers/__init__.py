"""Snapshots of the training state. Each rank's snapshot is copied to the memory of another rank, as in Gemini (SOSP
2023). These copies survive the loss of a node and need no storage.
"""
