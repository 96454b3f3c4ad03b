"""The APIs other than OpenAI's completions and chat: Responses, Messages, tokens. Each is translated into chats."""
