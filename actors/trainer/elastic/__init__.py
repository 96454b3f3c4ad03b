"""Elastic training: members join and leave, ranks are reassigned, and the run continues."""
