"""Anthropic's Messages API: its requests as chats, its answers and events, and the shape of its errors."""
