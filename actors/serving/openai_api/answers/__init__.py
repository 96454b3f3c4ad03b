"""The answers of OpenAI's API: their bodies, and the writers of complete and of streamed answers."""
