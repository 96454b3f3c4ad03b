"""The head of a cluster on machines of its own: alone, or one of several that take over from each other."""
