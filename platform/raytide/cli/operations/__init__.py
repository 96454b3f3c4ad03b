"""Commands of a cluster's operator: decisions, alerts and nodes."""
