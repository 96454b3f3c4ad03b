"""Entry points of the training loop: in one process, or inside Ray Train."""
