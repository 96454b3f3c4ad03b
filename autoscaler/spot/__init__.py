"""Models of spot capacity: reclaim hazards, availability, and the risk of a pool."""
