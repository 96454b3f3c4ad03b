"""The drivers of managed jobs: the driver process, and its start and end through Ray."""
