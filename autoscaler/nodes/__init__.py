"""The life of nodes: launch, back-off, occupancy, idleness, utilization, spend."""
