"""Finds the model size and the number of training tokens that give the lowest loss for a budget."""
