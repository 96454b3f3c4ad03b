"""The head of a cluster that is not embedded: a single machine, or several machines of which one leads at a time."""
