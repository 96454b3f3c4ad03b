"""The logs of jobs and endpoints, read from the nodes that wrote them."""
