"""The commands of endpoints and of registered models."""
