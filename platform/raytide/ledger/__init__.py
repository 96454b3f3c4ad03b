"""The ledger: the cost of every node and how it is split over holders, to the micro-dollar, as pure functions."""
