"""Image inputs: the pixels that a vision encoder reads, and the vectors that stand for an image in a prompt."""
