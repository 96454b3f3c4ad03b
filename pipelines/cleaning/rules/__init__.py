"""Rules that decide from a document's text alone. Each returns the reason to drop it, or None."""
