"""The record of a run: metrics, step times, profiles, plots, MLflow."""
