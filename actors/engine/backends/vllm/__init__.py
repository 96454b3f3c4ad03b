"""vLLM behind raytide's engine interface. Its abilities are detected from signatures, never from its version."""
