"""Logs of jobs and of endpoints, read from the nodes that wrote them."""
