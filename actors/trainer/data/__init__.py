"""The training data: the tokens of step k are a function of the seed and of k alone."""
