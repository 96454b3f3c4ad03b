"""The APIs besides OpenAI's completions and chat: Responses, Messages, and tokenization. The chats in their requests
are translated into chat requests.
"""
