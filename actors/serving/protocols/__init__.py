"""The APIs besides OpenAI's completions and chat: Responses, Messages, and tokenization. If a request to one of these
APIs contains a chat, the chat is translated into a chat request.
"""
