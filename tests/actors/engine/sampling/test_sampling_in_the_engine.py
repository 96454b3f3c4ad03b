"""The sampler does in the engine as in its own tests: with text, preemption, aborts and other requests."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import jsonschema
import pytest

from raytide.actors.engine import LLM, EngineConfig, GenChunk, GenRequest, NativeEngine, SamplingParams, Structured
from raytide.actors.engine.text.structured_output import Grammar, GrammarCompiler
from raytide.core.errors import UsageError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["tide", "ray"]}, "ages": {"type": "array", "items": {"enum": [1, 22, 333]}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
JSON = Structured("json_schema", json.dumps(SCHEMA))
CHOICE = Structured("choice", ("north", "south"))
PROMPTS = [[7, 8, place] for place in range(6)]

pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[NativeEngine]:
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir), max_model_len=128, block_size=8))
    await engine.start()
    yield engine
    await engine.shutdown()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Regular expressions are not compiled before this is set."""
    release, compile_one = threading.Event(), GrammarCompiler._compile

    def slow(self: GrammarCompiler, structured: Structured) -> Grammar:
        if structured.kind == "regex":
            release.wait(60)
        return compile_one(self, structured)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    yield release
    release.set()


async def text_of(chunks: AsyncIterator[GenChunk]) -> tuple[str, str | None]:
    said = [chunk async for chunk in chunks]
    return "".join(chunk.text for chunk in said), said[-1].finish_reason


def test_options_survive_preemption(model_dir: Path) -> None:
    params = [
        SamplingParams(max_tokens=40, seed=1, structured=JSON),
        SamplingParams(max_tokens=40, seed=2, frequency_penalty=1.5, repetition_penalty=1.2, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0, bad_words=["a", "th"], ignore_eos=True),
        SamplingParams(max_tokens=40, seed=3, min_tokens=40, top_k=5),
        SamplingParams(max_tokens=40, seed=4, logit_bias={9: 5.0}, min_p=0.01, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0, structured=JSON, logprobs=2),
    ]
    roomy = LLM(model_dir, block_size=4, max_model_len=64)
    crowded = LLM(model_dir, block_size=4, max_model_len=64, num_blocks=20, prefix_cache=False)
    expected = roomy.generate(PROMPTS, params)
    found = crowded.generate(PROMPTS, params)
    assert crowded.stats().preemptions > 0
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert len(found[3].token_ids) == 40
    tokenizer = roomy._core.tokenizer
    banned = [tuple(tokenizer.encode(text)) for text in ("a", " a", "th", " th")]
    output = found[2].token_ids
    assert not any(tuple(output[at : at + len(word)]) == word for word in banned for at in range(len(output)))
    for place in (0, 5):
        if found[place].finish_reason == "stop":
            jsonschema.validate(json.loads(found[place].text), SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        SamplingParams(logit_bias={10_000: 1.0}),
        SamplingParams(stop_token_ids=[-1]),
        SamplingParams(structured=Structured("regex", "((")),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_it_runs(model_dir: Path, wrong: SamplingParams) -> None:
    with pytest.raises(UsageError, match=r"logit_bias|stop_token_ids|regex"):
        LLM(model_dir).generate([[1, 2]], wrong)


async def test_a_stream_of_structured_output_is_valid_and_ends_with_stop(engine: NativeEngine) -> None:
    requests = [
        GenRequest(
            request_id=str(place),
            prompt=[5, place],
            sampling=SamplingParams(
                max_tokens=100, temperature=place % 2, seed=place, structured=JSON if place % 3 else CHOICE
            ),
        )
        for place in range(12)
    ]
    for place, (text, reason) in enumerate(await asyncio.gather(*(text_of(engine.generate(r)) for r in requests))):
        if place % 3 == 0:
            assert (text in CHOICE.spec, reason) == (True, "stop")
        elif reason == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
    stats = await engine.stats()
    assert (stats.running, stats.free_blocks) == (0, stats.num_blocks)


async def test_a_grammar_that_compiles_slowly_holds_up_no_other_request(
    engine: NativeEngine, stuck: threading.Event
) -> None:
    slow = SamplingParams(max_tokens=9, structured=Structured("regex", "[ab]{3}"), seed=1)
    waiting = asyncio.ensure_future(text_of(engine.generate(GenRequest(request_id="s", prompt=[1], sampling=slow))))
    for place in range(3):
        other = SamplingParams(max_tokens=5, structured=CHOICE) if place else SamplingParams(max_tokens=5)
        await text_of(engine.generate(GenRequest(request_id=f"o{place}", prompt=[1], sampling=other)))
    assert not waiting.done()
    stuck.set()
    text, reason = await waiting
    assert (len(text), set(text) <= {"a", "b"}, reason) == (3, True, "stop")


async def test_a_request_can_be_aborted_while_its_grammar_compiles(
    engine: NativeEngine, stuck: threading.Event
) -> None:
    slow = SamplingParams(structured=Structured("regex", "[ab]{4}"))
    request = GenRequest(request_id="s", prompt=[1], sampling=slow)
    waiting = asyncio.ensure_future(text_of(engine.generate(request)))
    await asyncio.sleep(0)  # it goes as far as it can
    assert await engine.abort("s")
    assert await waiting == ("", "abort")
    again = asyncio.ensure_future(text_of(engine.generate(request)))
    stuck.set()
    assert (await again)[1] == "stop"


async def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(engine: NativeEngine) -> None:
    bad = SamplingParams(structured=Structured("json_schema", '{"type": "nope"}'))
    with pytest.raises(UsageError, match="json_schema"):
        await text_of(engine.generate(GenRequest(request_id="s", prompt=[1], sampling=bad)))
    good = SamplingParams(structured=CHOICE)
    assert (await text_of(engine.generate(GenRequest(request_id="s", prompt=[1], sampling=good))))[1] == "stop"
