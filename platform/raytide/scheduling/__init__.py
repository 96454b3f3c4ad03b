"""What fits where, at what cost, and if not, why not: the simulation that the queue and the planner share."""
