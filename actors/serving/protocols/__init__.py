"""The APIs other than OpenAI's completions and chat: Responses, Messages, tokens. Each request becomes a chat
request.
"""
