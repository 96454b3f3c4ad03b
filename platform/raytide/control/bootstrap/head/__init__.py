"""The head of a cluster that is not embedded: one machine, or one of several that take over from each other."""
