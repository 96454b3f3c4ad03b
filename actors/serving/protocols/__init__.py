"""The APIs other than OpenAI's completions and chat, each translated into a chat request: Responses, Messages,
tokens.
"""
