"""Models that somebody else's OpenAI-compatible API hosts: the engine of an endpoint, or its fallback."""
