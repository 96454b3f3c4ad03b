"""No single request delays its neighbours' steps, whatever it asks for: the engine's thread does no work on texts, and
what it does for a token does not grow with what was asked.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from tests.actors.engine.sampling_cases import sequence
from tests.actors.engine.tiny import EOS, VOCAB, save_tokenizer

from raytide.actors.engine import EngineConfig, GenRequest, NativeEngine, SamplingParams, limits
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.sampling.grammar_mask import GrammarMask
from raytide.actors.engine.sampling.sampler import banned_tokens
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.sequence import StepPlan
from raytide.actors.engine.text.bad_words import BadWords
from raytide.actors.engine.text.structured_output import GrammarCompiler
from raytide.actors.engine.text.tokenizer import Tokenizer
from raytide.actors.engine.text.worker_pool import TextPool
from raytide.actors.engine.types import TokenLogprobs
from raytide.core.errors import EngineError, OverloadedError, RaytideError, UsageError

WORDS = [f"{chr(97 + place % 26)}{place} the end" for place in range(limits.MAX_BAD_WORDS)]
LONG = "a" * limits.MAX_WORD_CHARS
STEP_S = 0.05

HOSTILE: dict[str, dict[str, Any]] = {
    "bad words": {"bad_words": WORDS},
    "bad words that all begin alike": {"bad_words": [f"{'e' * 200}{place}" for place in range(limits.MAX_BAD_WORDS)]},
    "bad words of one token": {"bad_words": [chr(0x100 + place) for place in range(limits.MAX_BAD_WORDS)], "n": 32},
    "stop strings": {"stop": [LONG[:-1] + chr(98 + place) for place in range(limits.MAX_STOPS)], "n": 32},
    "logit bias": {"logit_bias": dict.fromkeys(range(VOCAB), -1.0), "n": 32},
    "stop tokens": {"stop_token_ids": list(range(1, 257)), "min_tokens": 20, "n": 32},
    "log probabilities": {"logprobs": 20, "n": 32},
    "filters": {"top_p": 0.9, "top_k": 300, "min_p": 1e-4, "temperature": 2.0, "n": 32},
    "samples": {"n": 32, "best_of": 32},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 1.0, "presence_penalty": 1.0, "n": 32},
    "a regular expression": {"structured": Structured("regex", "(a|b)*a(a|b){20}"), "n": 32},
    "a large schema": {
        "structured": Structured("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(300)}})),
        "n": 32,
    },
    "many choices": {"structured": Structured("choice", tuple(f"choice {i}" for i in range(1000))), "n": 32},
}


@pytest_asyncio.fixture
async def engine(model_dir: Path) -> AsyncIterator[NativeEngine]:
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir), max_running=64, max_batch_tokens=512))
    await engine.start()
    yield engine
    await engine.shutdown()


async def answer(engine: NativeEngine, name: str, prompt: str | list[int] = "x", **fields: Any) -> int:
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 1, **fields})
    request = GenRequest(request_id=name, prompt=prompt, sampling=params)
    return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])


def timed(monkeypatch: pytest.MonkeyPatch, method: str, found: list[float]) -> None:
    """Note the engine thread's CPU time in each call."""
    work = getattr(EngineCore, method)

    def noting(self: EngineCore, *args: Any) -> Any:
        began_s = time.thread_time()
        try:
            return work(self, *args)
        finally:
            found.append(time.thread_time() - began_s)

    monkeypatch.setattr(EngineCore, method, noting)


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_request_delays_a_neighbours_step(
    engine: NativeEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside plain requests of as many samples, since those cost what the model costs."""
    fields = {"temperature": 1.0, **HOSTILE[name]}
    plain = {"n": fields.get("n", 1), "max_tokens": 20}
    await answer(engine, "warm up", **fields)

    async def steps(**asked: Any) -> list[float]:
        spent: list[float] = []
        with monkeypatch.context() as patched:
            timed(patched, "step", spent)
            timed(patched, "add", spent)
            others = [asyncio.ensure_future(answer(engine, f"neighbour {i}", max_tokens=30)) for i in range(4)]
            await answer(engine, "it", **asked)
            await asyncio.gather(*others)
        return sorted(spent)

    alone, beside = await steps(**plain), await steps(**fields)
    # The median of what it adds and the largest: one step may meet a collection of garbage or a cold cache.
    assert beside[len(beside) // 2] - alone[len(alone) // 2] < STEP_S
    assert beside[-2] - alone[-2] < 2 * STEP_S


async def test_no_text_is_worked_on_in_the_engines_thread(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()

    def watch(owner: type, method: str) -> None:
        work = getattr(owner, method)

        def noting(*args: Any, **options: Any) -> Any:
            found.add(threading.current_thread().name.partition("_")[0])
            return work(*args, **options)

        monkeypatch.setattr(owner, method, noting)

    watch(Tokenizer, "encode_all")
    watch(GrammarCompiler, "_compile")
    for name, fields in HOSTILE.items():
        await answer(engine, name, **{**fields, "max_tokens": 1, "min_tokens": 0, "n": 1, "best_of": None})
    assert found <= {"raytide-text", "raytide-grammar", "MainThread"}
    assert "raytide-text" in found


async def test_a_long_text_is_cut_once_it_is_known_to_be_too_long(engine: NativeEngine) -> None:
    """A text's tokens take a hundred times its memory."""
    tokens = await engine.tokenize("word " * 800_000)
    assert 256 < len(tokens) < 100_000
    text = "def f(x): return x\n" * 5000
    whole = Tokenizer.encode(engine._started().tokenizer, text)
    assert await engine._started().tokenizer.encode_off_loop(text, enough=len(whole)) == whole


async def test_embeddings_do_not_keep_steps_away(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several requests, each of many prompts: what generates gets its token in each step that computes some of them."""
    plans: list[StepPlan] = []
    plan = Scheduler.plan

    def noting(scheduler: Scheduler, now_s: float = 0.0) -> StepPlan:
        plans.append(plan(scheduler, now_s))
        return plans[-1]

    monkeypatch.setattr(Scheduler, "plan", noting)
    await engine.pause()  # or it might have all of its tokens before the first prompt is there
    generating = asyncio.ensure_future(answer(engine, "it", max_tokens=60))
    embedding = [asyncio.ensure_future(engine.embed([[5] * 200] * 20)) for _ in range(6)]
    while (await engine.stats()).waiting < 7:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await engine.resume()
    await asyncio.gather(generating, *embedding)
    with_it = [place for place, each in enumerate(plans) if any(chunk.seq.seq_id == "it" for chunk in each.chunks)]
    beside = [each for each in plans[with_it[0] : with_it[-1] + 1] if any(chunk.seq.pooled for chunk in each.chunks)]
    assert beside
    assert len(with_it) == with_it[-1] + 1 - with_it[0]
    assert max(each.num_tokens for each in plans) <= engine._started().runner.batch_tokens


async def test_half_a_surrogate_pair_is_refused(engine: NativeEngine) -> None:
    for fields in ({"prompt": "\ud800"}, {"prompt": "\ud800" * 3000}, {"bad_words": ["\udfff"]}):
        with pytest.raises(UsageError, match="surrogate"):
            await answer(engine, "r", **fields)
    with pytest.raises(UsageError, match="surrogate"):
        await answer(engine, "r", structured=Structured("regex", "\ud800"))
    assert await answer(engine, "r") == 20


async def test_a_bad_word_with_a_special_tokens_name_is_banned_as_text_too(engine: NativeEngine) -> None:
    loop = engine._started()
    words = loop.input_processor.bad_words(SamplingParams(bad_words=["<eos>", "a <eos>"]))
    assert words is not None
    assert (EOS,) in words
    texts = {loop.tokenizer.rust.decode(list(word), skip_special_tokens=False) for word in words if EOS not in word}
    assert {"<eos>", " <eos>", "a <eos>", " a <eos>"} <= texts


async def test_texts_wait_in_a_queue_with_an_end_and_a_panic_ends_its_own_alone() -> None:
    pool, hold = TextPool(max_jobs=3), threading.Event()
    waiting = [asyncio.ensure_future(pool.run(lambda: hold.wait(30))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="3 texts"):
        await pool.run(lambda: True)
    hold.set()
    assert await asyncio.gather(*waiting) == [True] * 3

    def panics() -> None:
        raise BaseException("a panic in Rust")

    with pytest.raises(EngineError, match="panic"):
        await pool.run(panics)
    assert await pool.run(lambda: 7) == 7


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": ["x"] * 257},
        {"bad_words": ["x" * 257]},
        {"stop": ["x"] * 17},
        {"stop": "x" * 257},
        {"stop_token_ids": [1] * 257},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_sampling_parameters_have_limits_for_every_caller(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**fields)
    assert len(str(caught.value)) < 500


async def test_many_samples_of_a_long_prompt_are_refused(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytide.actors.engine.backends.native.input_processor.MAX_COPIED_TOKENS", 1000)
    assert await answer(engine, "few", [5] * 200, n=5, max_tokens=1) == 5
    with pytest.raises(UsageError, match="6 samples of 200 tokens"):
        await answer(engine, "many", [5] * 200, n=6, max_tokens=1)


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


@given(st.lists(TOKENS, max_size=8), st.lists(st.integers(0, 3), max_size=12), st.integers(0, 12))
def test_the_index_finds_what_a_scan_finds(words: list[tuple[int, ...]], tokens: list[int], prompt_len: int) -> None:
    seq = sequence("s", tokens, min(prompt_len, len(tokens)), SamplingParams(), bad_words=tuple(words))
    output = tokens[seq.prompt_len :]
    expected = {
        last for *start, last in words if not start or (len(start) <= len(output) and output[-len(start) :] == start)
    }
    assert set(banned_tokens(seq)) == expected


def test_a_step_looks_only_at_words_that_can_end_now() -> None:
    words = BadWords((place, place, 7) for place in range(10_000))
    assert words.next_banned([5, 9_999, 9_999], 3) == [7]
    assert len(words._after[9_999]) == 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer(path)


def kept_chars(grammars: GrammarCompiler) -> int:
    return sum(len(repr(kept)) for kept in grammars._kept.items())


def test_refused_grammars_are_remembered_without_their_text(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")
    grammars = GrammarCompiler(tokenizer.rust.to_str, VOCAB, [EOS])
    for place in range(140):
        for bad in (
            Structured("regex", "(" * 50_000 + str(place)),
            Structured("json_schema", "x" * 50_000 + str(place)),
        ):
            with pytest.raises(UsageError):
                grammars.compile(bad)
    with pytest.raises(UsageError, match="more than"):
        grammars.compile(Structured("regex", "a" * (limits.MAX_GRAMMAR_CHARS + 1)))
    assert len(grammars._kept) <= 256
    assert kept_chars(grammars) < 1 << 18
    assert not grammars._compiling


def test_what_is_kept_of_grammars_is_bounded_by_their_size(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")
    monkeypatch.setattr("raytide.actors.engine.text.structured_output.MAX_KEPT_GRAMMAR_CHARS", 1000)
    monkeypatch.setattr("raytide.actors.engine.text.structured_output._LEAST_CHARS", 1)
    grammars = GrammarCompiler(tokenizer.rust.to_str, VOCAB, [EOS])
    first = grammars.compile(Structured("regex", "0" * 300))
    for place in range(1, 4):
        grammars.compile(Structured("regex", str(place) * 300))
    assert (len(grammars._kept), grammars._kept_chars) == (3, 900)
    assert grammars.compile(Structured("regex", "0" * 300)) is not first
    kept = list(grammars._kept)
    grammars.compile(Structured("regex", "a" * 1001))
    assert list(grammars._kept) == kept


def test_short_grammars_count_for_what_they_grow_to(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")
    grammars = GrammarCompiler(tokenizer.rust.to_str, VOCAB, [EOS])
    for place in range(100):
        grammars.compile(Structured("regex", f"a{place}"))
    assert len(grammars._kept) == 32


def test_compilations_wait_in_a_queue_with_an_end(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, structured: hold.wait(30))
    grammars = GrammarCompiler(tokenizer.rust.to_str, VOCAB, [EOS])
    waiting = [grammars._submit(Structured("regex", f"a{place}")) for place in range(limits.MAX_COMPILING)]
    with pytest.raises(OverloadedError, match="16 grammars"):
        grammars.compile(Structured("regex", "b"))
    assert grammars._submit(Structured("regex", "a0")) is waiting[0]
    hold.set()
    assert all(each.future.result(30) for each in waiting)


def test_a_grammar_that_takes_too_long_for_a_token_ends_its_request(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")
    import torch

    grammar = GrammarCompiler(tokenizer.rust.to_str, VOCAB, [EOS]).compile(Structured("regex", "[a-z]+"))

    def ask(name: str, samples: int) -> list[tuple[int, Any]]:
        seqs = [sequence(f"{name}#{i}", [5], 1, SamplingParams()) for i in range(samples)]
        for seq in seqs:
            seq.request_id, seq.grammar = name, grammar
        return list(enumerate(seqs))

    def mask(
        constraint: GrammarMask, rows: list[tuple[int, Any]], clock: Callable[[], float]
    ) -> dict[int, RaytideError]:
        constraint._clock = clock
        return constraint.mask(torch.zeros(len(rows), VOCAB), rows)

    ticks = iter(range(10**6))
    slow = lambda: next(ticks) * 0.03  # noqa: E731  each mask takes 30 ms
    many, one, constraint = ask("many", 4), ask("one", 1), GrammarMask()
    assert set(mask(constraint, many, slow)) == {2, 3}  # 60 ms are over: the others are not even tried
    assert mask(constraint, one, slow) == {}
    ticks = iter(range(10**6))
    slower = lambda: next(ticks) * 0.06  # noqa: E731
    assert mask(constraint, one, slower) == {}  # once may be the processor's fault
    assert set(mask(constraint, one, slower)) == {0}


@pytest.mark.parametrize("requests", [1, 3])
async def test_log_probabilities_of_a_long_prompt_are_computed_in_parts(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    """Each position's logits take the memory of a whole vocabulary, whichever request it belongs to."""
    whole = await _prompt_logprobs(engine, "whole")
    monkeypatch.setattr(engine._started().scheduler, "_logprob_rows", 16)
    rows, logits = list[int](), ModelRunner.logits
    monkeypatch.setattr(
        ModelRunner, "logits", lambda self, chunks, more=(): rows.append(len(more)) or logits(self, chunks, more)
    )
    found = await asyncio.gather(*(_prompt_logprobs(engine, f"parts {place}") for place in range(requests)))
    assert max(rows) <= 16
    for parts in found:
        assert [each and each.token_id for each in whole] == [each and each.token_id for each in parts]
        assert [each and round(each.logprob, 3) for each in whole] == [
            each and round(each.logprob, 3) for each in parts
        ]


def test_a_large_vocabulary_has_fewer_positions_in_a_step(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model_dir=str(model_dir))
    assert EngineCore(config).scheduler._logprob_rows == limits.MAX_PROMPT_LOGPROB_ROWS
    monkeypatch.setattr("raytide.actors.engine.backends.native.engine_core.MAX_PROMPT_LOGITS", VOCAB * 10)
    assert EngineCore(config).scheduler._logprob_rows == 10


async def _prompt_logprobs(engine: NativeEngine, name: str) -> tuple[TokenLogprobs | None, ...]:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
    request = GenRequest(request_id=name, prompt=list(range(1, 201)), sampling=params)
    (found,) = [chunk.prompt_logprobs async for chunk in engine.generate(request)]
    assert found is not None
    return found
