"""Entry points of the training loop: training in one process, and training inside Ray Train."""
