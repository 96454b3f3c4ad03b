"""New nodes for replicas and members that do not fit: the chosen offerings, the reservations on them, the rejected
alternatives."""
