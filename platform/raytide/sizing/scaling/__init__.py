"""Finds the model size and the number of tokens that give the lowest loss for a budget."""
