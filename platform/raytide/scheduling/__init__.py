"""What fits where, at what cost, and why not: the simulation that the queue and the planner share."""
