"""The ledger: the cost of every node and its split over holders, to the micro-dollar, as pure functions."""
