"""Paged KV cache: the tensors, the pool of blocks, and the prefixes that sequences share."""
