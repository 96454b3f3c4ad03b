"""Models of spot: reclaim hazards, availability, and the risk of a pool."""
