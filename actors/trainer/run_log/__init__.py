"""The record of a run: metrics, events, step times, profiles, plots, MLflow."""
