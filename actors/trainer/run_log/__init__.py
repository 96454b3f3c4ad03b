"""The record of a training run: metrics, events, step times, profiles, plots, and MLflow."""
