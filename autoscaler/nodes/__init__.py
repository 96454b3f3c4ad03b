"""The life of nodes: launch, back-off after failures, occupancy, idleness, utilization, and spend."""
