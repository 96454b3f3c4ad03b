"""The training data. The tokens of a step depend only on the seed and the step's number."""
