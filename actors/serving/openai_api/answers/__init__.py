"""The answers of OpenAI's API: the types of their bodies, and the writers of complete and streamed answers."""
