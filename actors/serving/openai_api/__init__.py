"""The OpenAI API: wire types, the translation of requests for the engine, and the answers."""
