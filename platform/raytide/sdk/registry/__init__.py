"""Handles of registered models and of rollouts."""
