"""Anthropic's Messages API: requests translated into chats, answers and events, and the format of errors."""
