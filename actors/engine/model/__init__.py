"""The native engine's forward pass: weights, layers, LoRA and the batch that a step runs."""
