"""How much one request may ask for. Whatever is refused by these is refused before any work is done for it.

The serving API checks them for every engine; the native engine checks those on sampling once more. They are far above
what clients send, and low enough that no request takes more than milliseconds of what others wait for.
"""

from __future__ import annotations

__all__ = [
    "BODY_TIMEOUT_S",
    "MAX_BAD_WORDS",
    "MAX_BODY_BYTES",
    "MAX_CHOICES",
    "MAX_COMPILING",
    "MAX_COPIED_TOKENS",
    "MAX_EMBEDDING_INPUTS",
    "MAX_EMBEDDING_TOKENS",
    "MAX_GRAMMAR_CHARS",
    "MAX_HTTP_STOPS",
    "MAX_JSON_CONTAINERS",
    "MAX_JSON_DEPTH",
    "MAX_JSON_TEXTS",
    "MAX_JSON_VALUES",
    "MAX_KEPT_GRAMMAR_CHARS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_LOGPROB_ENTRIES",
    "MAX_MASK_MS",
    "MAX_MESSAGES",
    "MAX_NAME_CHARS",
    "MAX_PENDING_ENTRIES",
    "MAX_PRIORITY",
    "MAX_PROMPTS",
    "MAX_PROMPT_LOGITS",
    "MAX_PROMPT_LOGPROB_ROWS",
    "MAX_STOPS",
    "MAX_STOP_TOKEN_IDS",
    "MAX_TEXT_JOBS",
    "MAX_WORD_CHARS",
    "SEND_TIMEOUT_S",
]

MAX_BODY_BYTES = 4 << 20
"""Of a request to any route."""
MAX_JSON_VALUES = 1 << 18
"""Values in a body: every number, text, list and object counts. A prompt as token ids has one for each token."""
MAX_JSON_TEXTS = 1 << 16
"""Of these, texts; with the keys of objects."""
MAX_JSON_CONTAINERS = 1 << 15
"""Of these, lists and objects."""
MAX_JSON_DEPTH = 64
"""Lists and objects inside each other."""
BODY_TIMEOUT_S = 60.0
"""Until a body must have come whole."""
SEND_TIMEOUT_S = 30.0
"""How long a client may take nothing of its answer before it is given up."""

MAX_PROMPTS = 128
"""In one completion request."""
MAX_CHOICES = 256
"""Prompts times n, or best_of, of one request."""
MAX_MESSAGES = 4096
"""In one chat request, with their parts."""
MAX_EMBEDDING_INPUTS = 2048
MAX_EMBEDDING_TOKENS = 300_000
"""Of all inputs of an embedding request together, as at OpenAI."""
MAX_COPIED_TOKENS = 1 << 21
"""A prompt's tokens times its samples: each sample has a list of its own."""

MAX_HTTP_STOPS = 4
"""As at OpenAI; Python callers of the engine may give more."""
MAX_STOPS = 16
MAX_WORD_CHARS = 256
"""In one stop string or bad word."""
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_ENTRIES = 1 << 16
"""Log probabilities in one answer that is not streamed: tokens times (1 + top_logprobs)."""
MAX_PROMPT_LOGPROB_ROWS = 256
"""Positions of prompts whose log probabilities are computed in one step, of all requests together."""
MAX_PROMPT_LOGITS = 1 << 22
"""The same times the vocabulary: models with a large one compute fewer positions in a step."""
MAX_PENDING_ENTRIES = 1 << 14
"""Tokens and log probabilities of one answer that wait for a client which reads its stream too slowly."""
MAX_PRIORITY = 100
"""A request's priority counts as at most this, and at least its negative: with ageing, nothing waits for ever."""
MAX_NAME_CHARS = 1024
"""In a model's name, a cache salt, a role and other short texts."""

MAX_GRAMMAR_CHARS = 1 << 17
"""In a JSON schema, regular expression, grammar or all choices together."""
MAX_MASK_MS = 50.0
"""CPU time that the grammars of one request may take in one step, for all its samples."""
MAX_KEPT_GRAMMAR_CHARS = 1 << 16
"""In all compiled grammars that are kept together: a compiled one takes up to 475 bytes for each character."""
MAX_COMPILING = 16
"""Grammars that wait for a compiler; more are refused as overloaded."""
MAX_TEXT_JOBS = 64
"""Texts that wait for the tokenizer; more are refused as overloaded."""
