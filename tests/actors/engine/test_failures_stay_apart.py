"""One bad request, one broken step or one poisoned block never reaches another request."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from raytide.actors.engine import LLM, EngineConfig, GenRequest, NativeEngine, SamplingParams
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.sequence import Sampled, ScheduledChunk, Sequence
from raytide.actors.engine.text.structured_output import GrammarState
from raytide.actors.serving.health import ProgressWatch
from raytide.core.errors import EngineDeadError, EngineError, OverloadedError, UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[20 + i, 30 + i, 40 + i] for i in range(6)]
BAD = 66  # a token of which the breakages below make something evil


@pytest.fixture
def healthy(model_dir: Path) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in LLM(model_dir).generate(PROMPTS, GREEDY)]


def break_execute(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = ModelRunner.execute

    def broken(self: ModelRunner, chunks: list[ScheduledChunk]) -> dict[str, Sampled]:
        if any(chunk.seq.tokens[0] == BAD for chunk in chunks):
            raise MemoryError("no room for this one")
        return execute(self, chunks)

    monkeypatch.setattr(ModelRunner, "execute", broken)


def break_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bad sequence's KV and logits turn to NaN, as an overflow would make them."""
    logits, forward = ModelRunner.logits, PagedDecoder.forward
    rows: list[int] = []

    def watched(self: ModelRunner, chunks: list[ScheduledChunk], more_rows: list[int]) -> torch.Tensor:
        rows[:] = [i for i, chunk in enumerate(c for c in chunks if c.yields_token) if chunk.seq.tokens[0] == BAD]
        blocks = [block for chunk in chunks if chunk.seq.tokens[0] == BAD for block in chunk.seq.block_ids]
        out = logits(self, chunks, more_rows)
        for kv in self.cache.layers:
            kv.view(2, self.cache.num_blocks, -1)[:, blocks] = float("nan")
        return out

    def poisoned(self: PagedDecoder, *args: torch.Tensor) -> torch.Tensor:
        out = forward(self, *args)
        with torch.inference_mode():
            out[rows] = float("nan")
        return out

    monkeypatch.setattr(ModelRunner, "logits", watched)
    monkeypatch.setattr(PagedDecoder, "forward", poisoned)


def break_detokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from raytide.actors.engine.text.detokenizer import Vocabulary

    stream = Vocabulary.stream
    count = iter(range(100))

    class Broken:
        def push(self, token: int) -> str:
            raise ValueError("no such token")

    monkeypatch.setattr(Vocabulary, "stream", lambda self: Broken() if next(count) == 3 else stream(self))


@pytest.mark.parametrize("breakage", [break_execute, break_logits, break_detokenizer])
def test_only_the_request_at_fault_fails(
    breakage: object, healthy: list[list[int]], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)  # type: ignore[operator]
    llm = LLM(
        model_dir, num_blocks=8, max_model_len=64, block_size=32
    )  # so few blocks that a poisoned one is used again
    answers = llm.generate([*PROMPTS[:3], [BAD, 1, 2], *PROMPTS[3:]], GREEDY)
    failed = answers.pop(3).outputs[0]
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert failed.error is not None
    assert [answer.outputs[0].token_ids for answer in answers] == healthy
    assert all(kv.isfinite().all() for kv in llm._core.runner.cache.layers)
    again = llm.generate([*PROMPTS, *PROMPTS], GREEDY)
    assert [answer.outputs[0].token_ids for answer in again] == [*healthy, *healthy]
    stats = llm.stats()
    assert (stats.failed, stats.free_blocks) == (1, stats.num_blocks)


def test_a_batch_that_does_not_fit_in_memory_runs_in_parts(
    healthy: list[list[int]], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, refused = ModelRunner.execute, []

    def short_of_memory(self: ModelRunner, chunks: list[ScheduledChunk]) -> dict[str, Sampled]:
        if len(chunks) > 2:
            self.logits(chunks)  # fails late, after the KV is written
            refused.append(len(chunks))
            raise torch.OutOfMemoryError("no room for so many")
        return execute(self, chunks)

    monkeypatch.setattr(ModelRunner, "execute", short_of_memory)
    seeded = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.3, max_tokens=8, ignore_eos=True)
    llm = LLM(model_dir)
    answers = llm.generate([*PROMPTS, PROMPTS[0]], [*[GREEDY] * len(PROMPTS), seeded])
    monkeypatch.undo()
    assert [answer.token_ids for answer in answers[:-1]] == healthy
    assert answers[-1].token_ids == LLM(model_dir).generate([PROMPTS[0]], seeded)[0].token_ids
    assert refused
    assert llm.stats().failed == 0


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_request_whose_one_sample_fails_ends_as_a_whole(
    at: int, healthy: list[list[int]], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = ModelRunner.execute

    def broken(self: ModelRunner, chunks: list[ScheduledChunk]) -> dict[str, Sampled]:
        if any(chunk.seq.index == 2 and chunk.seq.output_len == at for chunk in chunks):
            raise ValueError("the third sample is cursed")
        return execute(self, chunks)

    monkeypatch.setattr(ModelRunner, "execute", broken)
    llm = LLM(model_dir, block_size=2)
    cursed = SamplingParams(n=3, best_of=4, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    answers = llm.generate([*PROMPTS, [5, 6, 7]], [*[GREEDY] * len(PROMPTS), cursed])
    assert [completion.finish_reason for completion in answers.pop().outputs] == ["error"] * 3
    assert [answer.token_ids for answer in answers] == healthy
    stats = llm.stats()
    assert (stats.failed, stats.free_blocks) == (1, stats.num_blocks)


def test_a_grammar_that_panics_fails_its_request_alone(
    healthy: list[list[int]], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")

    class Panic(BaseException):
        """A panic in Rust arrives as such an exception."""

    fill, calls = GrammarState.fill, iter(range(100))

    def sometimes(self: GrammarState, mask_W: object) -> None:
        if next(calls) == 2:
            raise Panic("index out of bounds")
        fill(self, mask_W)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarState, "fill", sometimes)
    llm = LLM(model_dir)
    strict = SamplingParams(structured=Structured("regex", "[a-z]{20}"), max_tokens=20)
    answers = llm.generate([*PROMPTS, [5, 6]], [*[GREEDY] * len(PROMPTS), strict])
    failed = answers.pop()
    assert (failed.finish_reason, "index out of bounds" in str(failed.error)) == ("error", True)
    assert [answer.token_ids for answer in answers] == healthy
    assert llm.generate([[5, 6]], strict)[0].finish_reason == "stop"


async def test_the_async_engine_outlives_a_defect_of_its_own_loop(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir)))
    await engine.start()
    step = EngineCore.step
    broken = iter([True])

    def sometimes(self: EngineCore) -> object:
        if next(broken, False):
            raise RuntimeError("a defect")
        return step(self)

    monkeypatch.setattr(EngineCore, "step", sometimes)

    async def ask(name: str) -> int:
        request = GenRequest(request_id=name, prompt=[5, 6], sampling=GREEDY)
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    with pytest.raises(EngineError, match="a defect"):
        await ask("first")
    assert await asyncio.gather(ask("second"), ask("third")) == [8, 8]
    await engine.shutdown()
    with pytest.raises(OverloadedError):
        await ask("late")


async def test_streams_end_when_the_thread_dies(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir)))
    await engine.start()

    def dead(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(EngineCore, "step", dead)
    with pytest.raises(EngineDeadError, match="died"):
        async for _ in engine.generate(GenRequest(request_id="r", prompt=[5])):
            pass
    assert not await engine.abort("r")
    with pytest.raises(EngineDeadError, match="died"):
        await engine.stats()
    with pytest.raises(EngineDeadError, match="died"):
        await anext(engine.generate(GenRequest(request_id="s", prompt=[5])))
    await engine.shutdown()


class Panic(BaseException):
    """A panic in Rust arrives as such an exception."""


def panicking(*_: object) -> None:
    raise Panic("called `Option::unwrap()` on a `None` value")


async def ask(engine: NativeEngine, name: str, prompt: list[int] | None = None) -> list[int]:
    request = GenRequest(request_id=name, prompt=prompt or [5, 6], sampling=GREEDY)
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids]


@pytest.mark.parametrize("where", [(ModelRunner, "logits"), (EngineCore, "step"), (EngineCore, "add")])
async def test_a_panic_ends_its_request_and_not_the_thread(
    where: tuple[type, str], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir)))
    await engine.start()
    with monkeypatch.context() as broken:
        broken.setattr(*where, panicking)
        with pytest.raises(EngineError, match="unwrap"):
            await ask(engine, "first")
    assert len(await ask(engine, "second")) == 8
    await engine.shutdown()


async def test_a_detokenizer_that_panics_fails_its_request_alone(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytide.actors.engine.text.detokenizer import Vocabulary

    bytes_of = Vocabulary.bytes_of
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir)))
    await engine.start()
    calls = iter(range(1000))
    monkeypatch.setattr(
        Vocabulary, "bytes_of", lambda self, token: panicking() if next(calls) == 3 else bytes_of(self, token)
    )
    ends = await asyncio.gather(ask(engine, "a"), ask(engine, "b"), return_exceptions=True)
    assert sorted(isinstance(end, EngineError) for end in ends) == [False, True]
    await engine.shutdown()


@pytest.mark.parametrize("where", [(ModelRunner, "logits"), (EngineCore, "step")])
async def test_an_engine_that_computes_nothing_any_more_says_that_it_is_dead(
    where: tuple[type, str], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is lost fails each request alone: only several of them together show it."""
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir)))
    await engine.start()
    monkeypatch.setattr(*where, panicking)
    monkeypatch.setattr(ModelRunner, "prompt_logits", panicking)
    for name in ("a", "b", "c"):
        with pytest.raises(EngineError):
            await ask(engine, name)
    with pytest.raises(EngineDeadError):
        await engine.stats()
    with pytest.raises(EngineDeadError):
        await ask(engine, "d")
    await engine.shutdown()


async def test_bad_requests_alone_do_not_make_an_engine_dead(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_execute(monkeypatch)
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir)))
    await engine.start()
    for place in range(7):
        with pytest.raises(EngineError, match="no room"):
            await ask(engine, f"bad {place}", [BAD, 1])
    assert len(await ask(engine, "good")) == 8
    await engine.shutdown()


async def test_a_thread_that_hangs_in_a_command_is_seen(model_dir: Path) -> None:
    engine, hangs = NativeEngine(EngineConfig(model_dir=str(model_dir))), threading.Event()
    await engine.start()
    watch = ProgressWatch(limit_s=60.0)
    assert watch.problem(await engine.stats(), 0.0) is None
    stuck = asyncio.ensure_future(engine._call(lambda loop: hangs.wait(60)))
    stats = await engine.stats()
    assert stats.pending_commands == 1
    assert watch.problem(stats, 1.0) is None
    assert "commands wait" in str(watch.problem(await engine.stats(), 62.0))
    hangs.set()
    await stuck
    assert watch.problem(await engine.stats(), 63.0) is None
    await engine.shutdown()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [([], "0 tokens"), ([1] * 64, "64 tokens"), ([1, 512], "outside 0 to 511"), ([-1], "outside 0 to 511")],
)
def test_a_bad_prompt_is_refused_before_anything_runs(prompt: list[int], says: str, model_dir: Path) -> None:
    llm = LLM(model_dir, max_model_len=64)
    with pytest.raises(UsageError, match=says):
        llm.generate([[1, 2], prompt])
    assert llm.stats().steps == 0
    assert len(llm.generate([[1, 2]], GREEDY)) == 1


def test_a_request_that_no_pool_can_hold_is_refused() -> None:
    from raytide.actors.engine.kv_cache.block_pool import BlockPool
    from raytide.actors.engine.scheduler.scheduler import Scheduler

    scheduler = Scheduler(BlockPool(4, 2), max_running=2, max_batch_tokens=8)
    seq = Sequence("big", [1] * 6, 6, GREEDY, 9, frozenset(), 0)
    with pytest.raises(UsageError, match="KV for 9 tokens; the engine holds 8"):
        scheduler.add(seq)
    assert not scheduler.has_work


def test_no_request_is_refused_while_a_place_is_free(model_dir: Path) -> None:
    core = EngineCore(EngineConfig(model_dir=str(model_dir), max_running=2, max_waiting=1))

    def add(name: str) -> None:
        core.add(GenRequest(request_id=name, prompt=[5, 6], sampling=GREEDY), [5, 6])

    for name in ("a", "b", "c"):  # two places and one that waits, before any step
        add(name)
    with pytest.raises(OverloadedError):
        add("d")
