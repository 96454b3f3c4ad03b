"""The APIs beside OpenAI's completions and chat, each translated into a chat request: Responses, Messages, tokens."""
