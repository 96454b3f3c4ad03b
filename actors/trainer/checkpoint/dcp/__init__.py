"""The planners, the storage and the checked metadata for torch's distributed checkpoint (DCP)."""
