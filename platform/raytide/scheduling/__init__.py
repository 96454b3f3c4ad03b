"""The placement simulation that the queue and the planner share: what fits where, at what cost, and why not."""
