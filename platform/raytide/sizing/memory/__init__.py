"""The bytes that a rank needs, by term."""
