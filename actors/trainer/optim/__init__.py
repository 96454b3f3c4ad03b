"""Optimizers, their state, the learning rate and the anomaly guard."""
