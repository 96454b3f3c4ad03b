"""The number of replicas of each endpoint, and their nodes."""
