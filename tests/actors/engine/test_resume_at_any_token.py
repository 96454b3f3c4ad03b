"""A request that is cut after any token and goes on in another native engine ends as the undisturbed one does, with
every option, whatever is cached there and whatever runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_adapter

from raytide.actors.engine import EngineConfig, GenChunk, GenRequest, SamplingParams
from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.operations import export_kv, import_kv
from raytide.actors.engine.backends.native.output_processor import RequestFailure
from raytide.actors.engine.base import StreamProgress, aborted_chunks, check_features
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.types import SampleProgress
from raytide.core.errors import UsageError

PROMPT = list(range(40, 63))
SCHEMA = '{"type": "array", "items": {"enum": ["tide", "äöü", 17]}, "minItems": 3, "maxItems": 6}'
DRAWN: dict[str, object] = {"temperature": 0.9, "seed": 11, "max_tokens": 16, "ignore_eos": True}
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "drawn": {},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 9, "seed": -3},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 1.1, "frequency_penalty": 0.9, "top_k": 5},
    "logit_bias": {"logit_bias": {7: 4.0, 300: -50.0}},
    "stop strings": {"stop": ["%mid"], "max_tokens": 30},
    "stop string that stays": {"stop": ["%mid"], "include_stop_str_in_output": True},
    "stop string that never comes": {"stop": ["%end"]},
    "stop string after min_tokens": {"stop": ["%mid"], "min_tokens": 12},
    "stop tokens": {"stop_token_ids": ["%mid"]},
    "min_tokens": {"stop_token_ids": ["%mid"], "min_tokens": 12},
    "bad words": {"bad_words": ["%pair"], "temperature": 0},
    "bad words, drawn": {"bad_words": ["e", "%pair"]},
    "json schema": {"structured": Structured("json_schema", SCHEMA), "max_tokens": 60},
    "json schema with min_tokens": {"structured": Structured("json_schema", SCHEMA), "max_tokens": 60, "min_tokens": 9},
    "characters of many bytes": {"structured": Structured("regex", "[äß€漢😀]{7}"), "max_tokens": 60},
    "many bytes before a stop string": {
        "structured": Structured("regex", "[😀]{3}a😁"),
        "stop": ["😁"],
        "max_tokens": 60,
    },
    "three samples": {"n": 3, "seed": 4},
    "three samples with ends": {"n": 3, "seed": 4, "stop_token_ids": ["%mid"], "logprobs": 1},
    "logprobs": {"logprobs": 3, "top_p": 0.8, "frequency_penalty": 0.5},
    "prompt logprobs": {"prompt_logprobs": 2, "n": 2},
}
ENGINES: dict[str, dict[str, object]] = {
    "alone": {"prefix_cache": False, "max_running": 3},
    "cached": {},
    "chunks": {"max_batch_tokens": 9, "max_running": 9},
    "evicted": {"num_blocks": 24, "max_model_len": 90, "max_running": 6},
    "deterministic": {"deterministic": True, "num_blocks": 60, "max_model_len": 90},
}


def start(model_dir: Path, **options: object) -> EngineCore:
    # A step gives each sample one token, so that it can be cut after any.
    fields = {"model_dir": str(model_dir), "block_size": 4, "max_waiting": 500, "speculation": "off"}
    return EngineCore(EngineConfig.parse(fields | options, where="test"))


def ask(name: str, sampling: SamplingParams, **more: object) -> GenRequest:
    return GenRequest(request_id=name, prompt=PROMPT, sampling=sampling, **more)  # type: ignore[arg-type]


def run(core: EngineCore, requests: list[GenRequest], late: tuple[GenRequest, ...] = ()) -> dict[str, list[GenChunk]]:
    """The chunks of requests that enter together, and of those that come two steps later, by id."""
    chunks: dict[str, list[GenChunk]] = {request.request_id: [] for request in (*requests, *late)}
    for request in requests:
        core.add(request, PROMPT)
    steps = 0
    while core.has_work:
        for output in core.step():
            assert isinstance(output, GenChunk), output
            chunks[output.request_id].append(output)
        steps += 1
        for request in late if steps == 2 else ():
            core.add(request, PROMPT[::-1])
    return chunks


def cut(request: GenRequest, chunks: list[GenChunk], name: str) -> GenRequest:
    progress = StreamProgress(replace(request, request_id=name))
    for chunk in chunks:
        progress.add(chunk)
    return progress.resumed()


SamplingOf = Callable[[str], SamplingParams]
Outcome = tuple[list[int], str, list[str], list[int]]


def outcome(chunks: list[GenChunk], index: int) -> Outcome:
    """Tokens, text, finish reasons, and the tokens and ranks of the log probabilities of one sample."""
    mine = [chunk for chunk in chunks if chunk.index == index]
    reported = [each for chunk in mine for each in chunk.logprobs or ()]
    return (
        [token for chunk in mine for token in chunk.token_ids],
        "".join(chunk.text for chunk in mine),
        [chunk.finish_reason for chunk in mine if chunk.finish_reason],
        [number for each in reported for number in (each.token_id, each.rank, *(token for token, _ in each.top))],
    )


def figures(chunks: list[GenChunk], index: int) -> list[float]:
    reported = [each for chunk in chunks if chunk.index == index for each in chunk.logprobs or ()]
    return [number for each in reported for number in (each.logprob, *(logprob for _, logprob in each.top))]


def check_same(found: list[GenChunk], whole: list[GenChunk], *, exactly: bool) -> None:
    for index in {chunk.index for chunk in whole}:
        assert outcome(found, index) == outcome(whole, index)
        assert figures(found, index) == pytest.approx(figures(whole, index), abs=0 if exactly else 1e-4)
    bill, expected = found[-1].usage, whole[-1].usage
    assert bill is not None
    assert expected is not None
    assert (bill.prompt_tokens, bill.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)
    assert bill.cached_tokens <= len(PROMPT)
    assert sum(chunk.prompt_logprobs is not None for chunk in found) == (whole[0].prompt_logprobs is not None)


@pytest.fixture(scope="module")
def sampling_of(model_dir: Path) -> SamplingOf:  # type: ignore[no-untyped-def]
    """The parameters of an option; %-words stand for what the same request without it generates."""

    @cache
    def sampling(option: str) -> SamplingParams:
        given = dict(OPTIONS[option])
        names = [name for name in ("stop", "stop_token_ids", "bad_words") if name in given]
        free = DRAWN | {name: each for name, each in given.items() if name not in (*names, "structured", "min_tokens")}
        core = start(model_dir)
        tokens, text, *_ = outcome(run(core, [ask("free", SamplingParams(**free))])["free"], 0)  # type: ignore[arg-type]
        pair = next(at for at in range(5, 14) if core.tokenizer.decode(tokens[at : at + 2]).isascii())
        words: dict[object, object] = {
            "%mid": tokens[6] if "stop_token_ids" in given else text[9:14],
            "%end": text[-6:] + "!",
            "%pair": core.tokenizer.decode(tokens[pair : pair + 2]),
        }
        for name in names:
            given[name] = [words.get(word, word) for word in given[name]]  # type: ignore[attr-defined]
        return SamplingParams(**(DRAWN | given))  # type: ignore[arg-type]

    return sampling


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", OPTIONS)
def test_cut_after_any_token_it_ends_as_if_it_had_not_been(
    option: str, engine: str, model_dir: Path, sampling_of: SamplingOf
) -> None:  # type: ignore[no-untyped-def]
    request = ask("r", sampling_of(option))
    exactly = engine == "deterministic"
    whole = run(start(model_dir, **({"deterministic": True} if exactly else {})), [request])["r"]
    assert len(whole) > 3
    there = start(model_dir, **ENGINES[engine])
    cuts = [cut(request, whole[:at], f"r{at}") for at in range(len(whole))]
    others = [ask(f"other{seed}", SamplingParams(seed=seed, max_tokens=3 * seed), priority=-1) for seed in range(1, 5)]
    rests = run(there, cuts, late=tuple(others))
    for at in range(len(whole)):
        check_same(whole[:at] + rests[f"r{at}"], whole, exactly=exactly)
    again = run(there, [cut(cuts[0], whole[:at] + rests[f"r{at}"][:2], f"r{at}") for at in range(len(whole) - 2)])
    for name, last in again.items():
        at = int(name[1:])
        check_same(whole[:at] + rests[name][:2] + last, whole, exactly=exactly)
    stats = there.stats()
    assert (stats.free_blocks, stats.failed) == (stats.num_blocks, 0)
    assert stats.generated_tokens == sum(
        len(chunk.token_ids) for each in (rests, again) for chunks in each.values() for chunk in chunks
    )
    if engine == "evicted":
        assert stats.preemptions > 0
    if engine in ("cached", "chunks"):
        assert stats.cached_tokens > 0


def test_an_unseeded_request_draws_as_one_with_the_engines_seed(model_dir: Path) -> None:
    free = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, ignore_eos=True, n=2)
    unseeded = run(start(model_dir, seed=10), [ask("r", free)])["r"]
    seeded = run(start(model_dir), [ask("r", replace(free, seed=11))])["r"]
    assert [outcome(unseeded, index) for index in (0, 1)] == [outcome(seeded, index) for index in (0, 1)]
    rest = run(start(model_dir), [cut(ask("r", free), unseeded[:6], "r")])["r"]
    assert [len(outcome([*unseeded[:6], *rest], index)[0]) for index in (0, 1)] == [12, 12]


def test_an_adapter_goes_on_with_the_adapter(model_dir: Path, tmp_path: Path) -> None:
    cores = [start(model_dir), start(model_dir)]
    for core in cores:
        operations.load_lora(core, "tuned", str(save_adapter(tmp_path / "tuned")))
    request = ask("r", SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), lora="tuned")
    whole = run(cores[0], [request])["r"]
    for at in range(1, 10):
        check_same(whole[:at] + run(cores[1], [cut(request, whole[:at], "r")])["r"], whole, exactly=False)


def test_a_resumed_request_can_move_with_its_kv(model_dir: Path) -> None:
    request = ask("r", SamplingParams(**DRAWN, stop=("never",)))  # type: ignore[arg-type]
    whole = run(start(model_dir), [request])["r"]
    resumed, here, there = cut(request, whole[:5], "r"), start(model_dir), start(model_dir)
    here.add(resumed, PROMPT)
    chunks = [chunk for _ in range(4) for chunk in here.step() if isinstance(chunk, GenChunk)]
    import_kv(there, export_kv(here, "r"), resumed, PROMPT)
    while there.has_work:
        chunks += [chunk for chunk in there.step() if isinstance(chunk, GenChunk)]
    check_same(whole[:5] + chunks, whole, exactly=False)


def test_tokens_that_the_grammar_forbids_end_their_request_alone(model_dir: Path, sampling_of: SamplingOf) -> None:
    core, sampling = start(model_dir), sampling_of("json schema")
    core.add(ask("wrong", sampling, resume=(SampleProgress((5, 6, 7)),)), PROMPT)
    core.add(ask("right", sampling), PROMPT)
    outputs = [output for _ in range(60) for output in core.step()]
    failed = [output for output in outputs if isinstance(output, RequestFailure)]
    assert [(each.request_id, type(each.error)) for each in failed] == [("wrong", UsageError)]
    assert [each.finish_reason for each in outputs if isinstance(each, GenChunk) and each.finish_reason] == ["stop"]
    assert core.stats().free_blocks == core.stats().num_blocks


def test_what_was_aborted_before_it_began_ends_only_the_samples_that_were_open() -> None:
    done = (SampleProgress((1, 2), "stop"), SampleProgress((3,)))
    chunks = aborted_chunks(ask("r", SamplingParams(n=3), resume=done), len(PROMPT))
    assert [(chunk.index, chunk.finish_reason) for chunk in chunks] == [(1, "abort"), (2, "abort")]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 3)


def test_an_engine_that_cannot_resume_refuses_by_name() -> None:
    request = ask("r", SamplingParams(), resume=(SampleProgress((1,)),))
    with pytest.raises(UsageError, match="does not support resume"):
        check_features(request, set(), "old")
    check_features(request, {"resume"}, "new")


def test_before_its_first_token_a_stream_is_asked_for_anew() -> None:
    request = ask("r", SamplingParams(n=2))
    assert StreamProgress(request).resumed() is request


def test_log_probabilities_of_the_prompt_are_not_computed_again(model_dir: Path) -> None:
    request, core = ask("r", SamplingParams(prompt_logprobs=1, seed=1, max_tokens=6)), start(model_dir)
    whole = run(core, [request])["r"]
    rest = run(core, [cut(request, whole[:2], "r")])["r"]
    assert rest[-1].usage is not None
    assert rest[-1].usage.cached_tokens > 0


def test_the_bill_has_the_cached_tokens_of_the_first_sample_that_runs(model_dir: Path) -> None:
    core, params = start(model_dir), SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True)
    whole = run(core, [ask("r", params)])["r"]
    ended = SampleProgress(tuple(outcome(whole, 0)[0]), "length")
    rest = run(core, [ask("r", params, resume=(ended,))])["r"]
    assert outcome(rest, 1) == outcome(whole, 1)
    usage = rest[-1].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.cached_tokens) == (12, len(PROMPT) // 4 * 4)
