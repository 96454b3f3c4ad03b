"""Limits on a single request. A request beyond them is refused before any work is done for it.

The serving API checks them for every engine; the native engine checks the limits on sampling again. They are far above
what clients send, and low enough that no request delays others by more than milliseconds.
"""

from __future__ import annotations

MAX_BODY_BYTES = 4 << 20
"""The most bytes of a request to any route."""
MAX_JSON_VALUES = 1 << 18
"""Values in a body: each number, text, list and object counts. A prompt as token ids has one for each token."""
MAX_JSON_TEXTS = 1 << 16
"""Texts in a body, keys of objects included."""
MAX_JSON_CONTAINERS = 1 << 15
"""Lists and objects in a body."""
MAX_JSON_DEPTH = 64
"""Nested lists and objects."""
BODY_TIMEOUT_S = 60.0
"""The seconds within which a whole body must arrive."""
MAX_TIMEOUT_S = 86400.0
"""The longest timeout in seconds that a request may ask for."""
SEND_TIMEOUT_S = 30.0
"""The seconds for which a client may leave its answer unread before the connection is closed."""

MAX_PROMPTS = 128
"""Prompts in one completion request."""
MAX_CHOICES = 256
"""The number of prompts in one request times its `n`, or `best_of`."""
MAX_MESSAGES = 4096
"""Messages, and parts of messages, in one chat request."""
MAX_IMAGES = 16
"""Images in one chat request."""
MAX_IMAGE_BYTES = 8 << 20
"""The most bytes of an image file. Images inside a body are bounded by `MAX_BODY_BYTES` too."""
MAX_IMAGE_PIXELS = 1 << 24
MAX_TOOLS = 128
MAX_TEMPLATE_KWARGS = 32
"""Tools of one request, and calls of one message."""
MAX_ARGUMENT_CHARS = 1 << 18
"""The most characters in the arguments of one call, and in the description of a tool."""
MAX_EMBEDDING_INPUTS = 2048
MAX_EMBEDDING_TOKENS = 300_000
"""Tokens of all inputs of an embedding request together, as at OpenAI."""
MAX_COPIED_TOKENS = 1 << 21
"""A prompt's tokens times its samples: each sample has a list of its own."""

MAX_HTTP_STOPS = 4
"""Stop strings in a request of OpenAI's API, as there; other callers of the engine may give more."""
MAX_STOPS = 16
MAX_WORD_CHARS = 256
"""Characters in one stop string or bad word."""
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_ENTRIES = 1 << 16
"""Log probabilities in one answer that is not streamed: tokens times (1 + top_logprobs)."""
MAX_PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose log probabilities are computed in one step, over all requests."""
MAX_PROMPT_LOGITS = 1 << 22
"""The most prompt logits (positions times vocabulary size) in one step: a larger vocabulary means fewer positions."""
MAX_PENDING_ENTRIES = 1 << 14
"""Tokens and log probabilities of one answer that wait for a slow reader."""
MAX_PRIORITY = 100
"""The largest priority; its negative is the smallest. With these bounds and ageing, no request waits for ever."""
MAX_NAME_CHARS = 1024
"""Characters in a model's name, a cache salt, a role and other short texts."""

MAX_GRAMMAR_CHARS = 1 << 17
"""Characters in a JSON schema, regular expression or grammar, or in all choices together."""
MAX_MASK_MS = 50.0
"""CPU time that the grammars of one request may take in one step, for all its samples."""
MAX_KEPT_GRAMMAR_CHARS = 1 << 16
"""Characters of all kept compiled grammars together: a compiled one takes up to 475 bytes for each."""
MAX_COMPILING = 16
"""Grammars that wait for a compiler; more are refused as overloaded."""
MAX_TEXT_JOBS = 64
"""Texts that wait for the tokenizer; more are refused as overloaded."""
