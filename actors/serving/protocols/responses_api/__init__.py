"""OpenAI's Responses API: the translation of requests into chats, the answers and their events, and stored
responses.
"""
