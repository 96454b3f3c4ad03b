"""New nodes for what does not fit: which offerings, for whom, and which were rejected."""
