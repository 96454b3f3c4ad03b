"""Data, tensor, context and pipeline parallelism, and the reduction of gradients."""
