"""The commands of a cluster's operator, for decisions, alerts and nodes."""
