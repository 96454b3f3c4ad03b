"""Image inputs: pixels in the form that a vision tower reads, and the vectors that stand for an image in a prompt."""
