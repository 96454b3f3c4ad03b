"""What is learned about spot: reclaim hazards, availability, the risk of a pool."""
