"""The API without HTTP: one module for each group of routes."""
