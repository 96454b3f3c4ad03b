"""OpenAI's Responses API: requests translated into chats, answers and events, and stored responses."""
