"""The registry of models and datasets."""
