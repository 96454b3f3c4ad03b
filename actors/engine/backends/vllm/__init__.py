"""vLLM behind raytide's engine interface. The features of the installed vLLM are detected from its function signatures,
never from its version.
"""
