"""Compiles constraints on outputs (a JSON schema, a regular expression, a grammar or choices) with llguidance. It
compiles in other threads, limits time and size, and caches the results.

`grammar_mask.py` advances a compiled grammar token by token.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from hashlib import blake2b
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from raytide.actors.engine.limits import MAX_COMPILING, MAX_GRAMMAR_CHARS, MAX_KEPT_GRAMMAR_CHARS
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.text.json_schemas import readable, readable_grammar
from raytide.actors.engine.text.optional_parts import check_optional_parts
from raytide.core.errors import ConfigError, OverloadedError, RaytideError, UsageError

_THREADS = 2
_STACK_BYTES = 256 << 20
"""The stack of a thread that compiles: llguidance recurses along references of a schema and rules of a grammar, and an
overflow ends the process. Memory is used only as far as a grammar needs it.
"""
_LOOK_S = 0.1
_MOST_WAIT_S = 120.0
"""The seconds for which a request waits for its grammar on a machine that is too busy to compile it."""
_KEPT = 256
_LEAST_CHARS = 2048
"""The smallest size that a compiled grammar counts in the cache: a short one grows to 1.7 MB while outputs use it."""
_MOST_RETRIED = 64
"""An upper bound on the tokens of one step: those of a step that failed are not in the output."""
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "max_grammar_size": 250_000,
    "max_lexer_states": 50_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
}
"""The library's limits on the work for one token and on the memory it keeps, set lower than its defaults."""
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_MAX_REASON_CHARS = 300
_END = "<|raytide: end|>"


def can_structure() -> bool:
    """Returns whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


class GrammarState:
    """The state of one output in its grammar. It can be dropped and rebuilt from the tokens at any time."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._taken: list[int] = []

    def follow(self, tokens: list[int], start: int = 0) -> None:
        """Moves the state to the position after an output. The output is `tokens` from index `start` on. Raises
        UsageError if the grammar does not allow the output. Only the last `_MOST_RETRIED` tokens may differ from the
        output that the state has followed so far. Earlier tokens are not compared.
        """
        known, length = len(self._taken), len(tokens) - start
        first = max(0, min(known, length) - _MOST_RETRIED)
        if tokens[start + first : start + known] != self._taken[first:]:  # a failed step is retried
            places = range(first, min(known, length))
            kept = next((i for i in places if tokens[start + i] != self._taken[i]), min(known, length))
            self._matcher.rollback(known - kept)
            del self._taken[kept:]
        self.consume(tokens[start + len(self._taken) :])

    def consume(self, tokens: list[int]) -> None:
        """Moves the state over the next tokens. Raises UsageError if the grammar does not allow them."""
        if tokens and not self._matcher.consume_tokens(tokens):
            reason = _shortened(self._matcher.get_error())
            raise UsageError(f"the grammar does not allow its own tokens: {reason}.", hint="Make it simpler.")
        self._taken += tokens

    def fill(self, mask_W: npt.NDArray[np.int32]) -> None:
        """Fills a bit mask: 1 for tokens that may come next, 0 for all others. Raises UsageError if llguidance
        fails.
        """
        self._matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        if self._matcher.is_error():
            raise UsageError(f"the grammar broke: {_shortened(self._matcher.get_error())}.", hint="Make it simpler.")

    def allowed(self, tokens: list[int]) -> int:
        """Returns the number of tokens at the start of `tokens` that the grammar allows in sequence. The state does not
        change.
        """
        return int(self._matcher.validate_tokens(tokens))

    @property
    def is_complete(self) -> bool:
        """True if nothing but the end of the output can follow."""
        return bool(self._matcher.is_stopped())


class Grammar:
    """A compiled grammar. Every sequence follows the grammar with a GrammarState of its own."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self.mask_words = -(-vocab_size // 32)

    def state(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy())


class _Compilation:
    """The compilation of a grammar, queued or running. Its time is the CPU time of its thread, so that other work on
    the machine does not count. Where threads have no such clock, as on macOS, it is the time since its start.
    """

    def __init__(self) -> None:
        self.future: Future[Grammar] = Future()
        self._spent_s: Callable[[], float] | None = None

    def begin(self) -> None:
        """Starts the clock; called in the thread that compiles."""
        clock: Callable[[], float] = time.monotonic
        if hasattr(time, "pthread_getcpuclockid"):
            clock = partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))
        began_s = clock()
        self._spent_s = lambda: clock() - began_s

    def spent_s(self) -> float:
        return 0.0 if self._spent_s is None else self._spent_s()


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        any_whitespace: bool = False,
        timeout_s: float = 10.0,
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._any_whitespace, self._timeout_s = any_whitespace, timeout_s
        self._tokenizer: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock, self._tokenizer_lock = Lock(), Lock()
        self._compiling: dict[bytes, _Compilation] = {}
        self._kept: OrderedDict[bytes, tuple[Grammar | UsageError, int]] = OrderedDict()  # with its size
        self._kept_chars = 0

    def compile(self, structured: Structured) -> Grammar:
        """Waits until the grammar is compiled, and returns it.

        Raises UsageError if the grammar is invalid or takes too long to compile. Raises OverloadedError if too many
        grammars wait or the machine is too busy. Raises ConfigError if llguidance is not installed or cannot read
        the tokenizer.
        """
        job = self._submit(structured)
        began_s = time.monotonic()
        while True:
            try:
                return job.future.result(_LOOK_S)
            except TimeoutError:
                self._check_time(job, structured, time.monotonic() - began_s)
            except RaytideError as error:
                raise copy(error) from None  # the cached one must not collect the callers' tracebacks

    async def compile_async(self, structured: Structured) -> Grammar:
        """Returns the compiled grammar without blocking the event loop. Raises the same errors as `compile`."""
        job = self._submit(structured)
        began_s = time.monotonic()
        compiling = asyncio.wrap_future(job.future)
        compiling.add_done_callback(_ignore_result)
        while not compiling.done():
            await asyncio.wait([compiling], timeout=_LOOK_S)
            if not compiling.done():
                self._check_time(job, structured, time.monotonic() - began_s)
        try:
            return compiling.result()
        except RaytideError as error:
            raise copy(error) from None

    def _check_time(self, job: _Compilation, structured: Structured, waited_s: float) -> None:
        if job.spent_s() > self._timeout_s:
            raise _refused(structured, f"it was not compiled within {self._timeout_s:g} s")
        if waited_s > _MOST_WAIT_S:
            raise OverloadedError(f"no grammar could be compiled within {waited_s:.0f} s.", hint="Retry later.")

    def _submit(self, structured: Structured) -> _Compilation:
        """Returns the compilation of a grammar, which it starts unless the grammar is cached or being compiled. Refused
        grammars are cached too, only as a digest and a short reason.
        """
        if not can_structure():
            raise ConfigError("structured output needs llguidance.", hint="Run pip install llguidance.")
        if structured.size > MAX_GRAMMAR_CHARS:
            raise _refused(structured, f"it has {structured.size} characters, more than {MAX_GRAMMAR_CHARS}")
        spec = _spec_text(structured)
        try:
            key = blake2b(f"{structured.kind}\0{spec}".encode(), digest_size=16).digest()
        except UnicodeEncodeError:
            raise _refused(structured, "it has half a surrogate pair") from None
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return _done(self._kept[key][0])
            job = self._compiling.get(key)
            if job is not None:
                return job
            if len(self._compiling) >= MAX_COMPILING:
                raise OverloadedError(f"{MAX_COMPILING} grammars are being compiled already.", hint="Retry later.")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="raytide-grammar")
            job = self._compiling[key] = _Compilation()
            before = threading.stack_size(_STACK_BYTES)
            try:
                self._pool.submit(self._run, job, structured, key, len(spec))
            finally:
                threading.stack_size(before)
        return job

    def _run(self, job: _Compilation, structured: Structured, key: bytes, chars: int) -> None:
        """Compiles a grammar, and caches it before its waiting requests continue."""
        job.begin()
        try:
            grammar = self._compile(structured)
        except BaseException as error:
            self._keep(key, chars, error)
            job.future.set_exception(error)
        else:
            self._keep(key, chars, grammar)
            job.future.set_result(grammar)

    def _keep(self, key: bytes, chars: int, result: Grammar | BaseException) -> None:
        with self._lock:
            self._compiling.pop(key, None)
            if isinstance(result, Grammar):
                if chars > MAX_KEPT_GRAMMAR_CHARS:
                    return  # it would evict all others, and then itself
                self._kept[key] = result, max(chars, _LEAST_CHARS)
            elif isinstance(result, UsageError) and not isinstance(result, ConfigError):
                self._kept[key] = copy(result), len(result.message)
            else:
                return
            self._kept_chars += self._kept[key][1]
            while len(self._kept) > _KEPT or self._kept_chars > MAX_KEPT_GRAMMAR_CHARS:
                self._kept_chars -= self._kept.popitem(last=False)[1][1]

    def _compile(self, structured: Structured) -> Grammar:
        import llguidance

        check_optional_parts(structured)
        try:
            text = _grammar_text(structured, self._any_whitespace)
            limits = llguidance.LLParserLimits(verbose_errors=False, **_LIMITS)
            matcher = llguidance.LLMatcher(self._vocabulary(), text, log_level=0, limits=limits)
            grammar = Grammar(matcher, self._vocabulary().vocab_size)
            if not matcher.is_error():
                matcher.compute_bitmask()  # the slowest step, and the first to find that a grammar is too complex
        except RaytideError:
            raise
        except BaseException as error:  # a panic in Rust is a BaseException
            raise _refused(structured, str(error)) from None
        if matcher.is_error():
            raise _refused(structured, matcher.get_error())
        return grammar

    def _vocabulary(self) -> Any:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = _vocabulary(self._tokenizer_json(), self._vocab_size, self._eos)
                except Exception as error:
                    raise ConfigError(f"structured output cannot read this model's tokenizer: {error}.") from None
            return self._tokenizer


def _vocabulary(tokenizer_json: str, vocab_size: int, eos: list[int]) -> Any:
    """Returns llguidance's tokenizer. llguidance needs an end token: for a model without one, a new special token is
    added.
    """
    import llguidance

    if not eos:
        tokenizer = Tokenizer.from_str(tokenizer_json)
        tokenizer.add_special_tokens([_END])
        eos = [tokenizer.get_vocab_size() - 1]
        tokenizer_json, vocab_size = tokenizer.to_str(), max(vocab_size, eos[0] + 1)
    return llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)


def _grammar_text(structured: Structured, any_whitespace: bool) -> str:
    """Returns the grammar in llguidance's language, with an option that makes it compute masks from bytes alone. By
    default llguidance tokenizes, for each token, the longest text that the grammar forces. That takes time, and it
    reads a special token's name in this text as the token, although the token has no text.
    """
    import llguidance

    spec, grammars = _spec_text(structured), list[dict[str, Any]]()
    if structured.kind == "json_schema":
        text = "start: @schema"
        schema = readable(json.loads(spec))
        if not any_whitespace and schema is not False:
            schema = {} if schema is True else schema
            schema = {**schema, "x-guidance": {**_COMPACT, **schema.get("x-guidance", {})}}
        grammars = [{"name": "schema", "json_schema": schema}]
    elif structured.kind == "choice":  # one terminal: a rule would be an item of the parser for each choice
        text = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, structured.spec))
    elif structured.kind == "regex":
        text = json.loads(llguidance.grammar_from("regex", spec))["grammars"][0]["lark_grammar"]
    else:
        text = llguidance.grammar_from("grammar", readable_grammar(spec))
    return json.dumps({"grammars": [{"lark_grammar": _NO_FORCING + text}, *grammars]})


def _spec_text(structured: Structured) -> str:
    if structured.kind == "json_schema" and not structured.spec:
        return "{}"
    return structured.spec if isinstance(structured.spec, str) else json.dumps(structured.spec)


def _refused(structured: Structured, why: str) -> UsageError:
    message = f"the {structured.kind} of structured output cannot be used: {_shortened(why)}."
    return UsageError(message, hint="Correct it.")


def _shortened(why: str) -> str:
    """Returns the message cut to a bounded length, because it may contain the whole grammar."""
    return why if len(why) <= _MAX_REASON_CHARS else f"{why[:_MAX_REASON_CHARS]}..."


def _done(outcome: Grammar | UsageError) -> _Compilation:
    job = _Compilation()
    if isinstance(outcome, UsageError):
        job.future.set_exception(outcome)
    else:
        job.future.set_result(outcome)
    return job


def _ignore_result(future: asyncio.Future[Grammar]) -> None:
    """Retrieves the exception of an abandoned compilation, which asyncio would otherwise log."""
    if not future.cancelled():
        future.exception()
