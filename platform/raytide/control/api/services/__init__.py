"""The API's operations without HTTP, with one module for each group of routes."""
