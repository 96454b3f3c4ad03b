"""Elastic training. Members join and leave, ranks are reassigned, and the run continues."""
