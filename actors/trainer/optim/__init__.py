"""Optimizers, their states, the learning rate and the guard against anomalies."""
