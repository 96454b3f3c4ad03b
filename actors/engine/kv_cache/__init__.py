"""The paged KV cache: its tensors, its pool of blocks, and the prefixes that sequences share."""
