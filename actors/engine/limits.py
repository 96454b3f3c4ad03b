"""Limits on a single request, and on the work that all requests together may have in progress. A request that exceeds a
limit on requests is refused before any work is done for it.

The serving API checks the limits for every engine. The native engine checks the limits on sampling a second time. The
limits are far above what clients send, but low enough that no request delays others by more than milliseconds.
"""

from __future__ import annotations

MAX_BODY_BYTES = 4 << 20
"""The most bytes of a request to any route."""
MAX_JSON_VALUES = 1 << 18
"""The most values in a body: each number, text, list and object counts. A prompt as token ids has one per token."""
MAX_JSON_TEXTS = 1 << 16
"""The most texts in a body, keys of objects included."""
MAX_JSON_CONTAINERS = 1 << 15
"""The most lists and objects in a body."""
MAX_JSON_DEPTH = 64
"""The deepest nesting of lists and objects in a body."""
BODY_TIMEOUT_S = 60.0
"""The seconds within which a whole body must arrive."""
MAX_TIMEOUT_S = 86400.0
"""The longest timeout in seconds that a request may ask for."""
SEND_TIMEOUT_S = 30.0
"""The seconds for which a client may leave its answer unread before the connection is closed."""

MAX_PROMPTS = 128
"""The most prompts in one completion request."""
MAX_CHOICES = 256
"""The largest product of a request's number of prompts and its `n`, or `best_of`."""
MAX_MESSAGES = 4096
"""The most messages, and parts of messages, in one chat request."""
MAX_IMAGES = 16
"""The most images in one chat request."""
MAX_IMAGE_BYTES = 8 << 20
"""The most bytes of an image file. Images inside a body are bounded by `MAX_BODY_BYTES` too."""
MAX_IMAGE_PIXELS = 1 << 24
MAX_TOOLS = 128
MAX_TEMPLATE_KWARGS = 32
"""The most variables of the chat template in one request. MAX_TOOLS bounds its tools, and the calls of one message."""
MAX_ARGUMENT_CHARS = 1 << 18
"""The most characters in the arguments of one call, and in the description of a tool."""
MAX_EMBEDDING_INPUTS = 2048
MAX_EMBEDDING_TOKENS = 300_000
"""The most tokens of all inputs of an embedding request together, as at OpenAI."""
MAX_COPIED_TOKENS = 1 << 21
"""The largest product of a prompt's tokens and its samples: each sample has its own list of tokens."""

MAX_STOPS = 16
"""The most stop strings in a request. OpenAI takes four, but the editor extension Continue sends a dozen."""
MAX_WORD_CHARS = 256
"""The most characters in one stop string or bad word."""
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_ENTRIES = 1 << 16
"""The most log probabilities in one answer that is not streamed: tokens times (1 + top_logprobs)."""
MAX_PROMPT_LOGPROB_ROWS = 256
"""The most prompt positions, over all requests, whose log probabilities are computed in one step."""
MAX_PROMPT_LOGITS = 1 << 22
"""The most prompt logits (positions times vocabulary size) in one step: a larger vocabulary means fewer positions."""
MAX_PENDING_ENTRIES = 1 << 14
"""The most tokens and log probabilities of one answer that may wait for a slow reader."""
MAX_PRIORITY = 100
"""The largest priority; its negative is the smallest. With these bounds and ageing, no request waits for ever."""
MAX_NAME_CHARS = 1024
"""The most characters in a model's name, a cache salt, a role and other short texts."""

MAX_GRAMMAR_CHARS = 1 << 17
"""The most characters in a JSON schema, regular expression or grammar, or in all choices together."""
MAX_MASK_MS = 50.0
"""The most CPU time in milliseconds that the grammars of one request may take in one step, for all its samples."""
MAX_KEPT_GRAMMAR_CHARS = 1 << 16
"""The most characters of all cached compiled grammars together; each character takes up to 475 bytes of memory."""
MAX_COMPILING = 16
"""The most grammars that are compiled or wait for it; more are refused as overloaded."""
MAX_TEXT_JOBS = 64
"""The most texts that are tokenized or wait for it; more are refused as overloaded."""
