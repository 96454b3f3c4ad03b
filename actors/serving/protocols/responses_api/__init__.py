"""OpenAI's Responses API, without stored conversations: its requests as chats, and its answers and events."""
