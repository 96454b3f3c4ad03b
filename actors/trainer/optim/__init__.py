"""Optimizers and their state, the learning rate schedule, and the guard against anomalous batches."""
