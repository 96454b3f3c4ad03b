"""vLLM behind raytide's engine interface; it is probed by signature, never by version."""
