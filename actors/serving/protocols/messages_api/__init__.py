"""Anthropic's Messages API: the translation of requests into chats, the answers and their events, and the error
format.
"""
