"""The ways to start the training loop: alone, or inside Ray Train."""
