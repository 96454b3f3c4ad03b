"""The drivers of managed jobs: their process, and their start and end through Ray."""
