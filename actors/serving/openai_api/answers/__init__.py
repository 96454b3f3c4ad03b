"""The answers of OpenAI's API: their bodies, and the writers of whole ones and of streams."""
