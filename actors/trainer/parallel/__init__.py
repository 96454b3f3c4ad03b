"""Data, tensor, context and pipeline parallelism, with the reduction of gradients over ranks."""
