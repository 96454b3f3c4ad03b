"""Measures node types before they are used. A queued job times the node's memory, matrix products, network and disk."""
