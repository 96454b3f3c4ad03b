"""The APIs besides OpenAI's completions and chat: Responses, Messages, and tokens. Their requests are translated into
chat requests.
"""
