"""Hugging Face directories in and out: weights, adapters, export."""
