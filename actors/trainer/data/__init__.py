"""The tokens of step k, as a function of the seed and of k alone."""
