"""raytide's own engine: continuous batching over a paged KV cache, on torch and raytide's kernels."""
