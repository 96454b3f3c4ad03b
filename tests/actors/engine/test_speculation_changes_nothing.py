"""Answers are the same to the bit with and without speculation, whatever the options of the requests and whatever
happens to them meanwhile.
"""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_adapter

from raytide.actors.engine import LLM, EngineConfig, GenRequest, SamplingParams
from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.operations import export_kv, import_kv
from raytide.actors.engine.base import StreamProgress
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.actors.engine.sequence import ScheduledChunk
from raytide.actors.engine.types import GenChunk

pytestmark = pytest.mark.usefixtures("free_drafts")

OPTIONS: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.5, "logit_bias": {61: 30.0, 62: 30.0}},  # few tokens, so that an output repeats itself
    {"temperature": 1.0, "logit_bias": {61: 30.0, 62: 30.0}, "frequency_penalty": 0.2, "logprobs": 1},
    {"temperature": 0, "logprobs": 2, "stop": ["qu", "e"], "min_tokens": 5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    {"logit_bias": {7: 3.0, 0: 6.0}, "ignore_eos": False},
    {"bad_words": ["e", "in"], "logprobs": 0},
    {"stop": ["th", "##"], "include_stop_str_in_output": True},
    {"stop_token_ids": tuple(range(40)), "ignore_eos": False, "min_tokens": 4},
    {"n": 3, "top_k": 20},
    {"n": 1, "best_of": 3},
    {"structured": Structured("regex", "(ab|[a-z]{4} )+"), "logprobs": 1},
    {
        "structured": Structured("json_schema", '{"type":"array","items":{"type":"integer"},"minItems":4}'),
        "min_tokens": 9,
    },
    {"prompt_logprobs": 1, "top_p": 0.9},
    {"min_p": 0.05, "logprobs": 3},
]
CONDITIONS: dict[str, dict[str, object]] = {
    "room": {},
    "chunks": {"max_batch_tokens": 9, "max_running": 6},
    "recompute": {"num_blocks": 34, "max_model_len": 100},
    "swap": {"num_blocks": 34, "max_model_len": 100, "host_memory_gb": 0.02},
}


@dataclass
class Case:
    """A request that is sent in some step, and perhaps moved or cut in a later one."""

    request: GenRequest
    at: int
    moved_at: int | None
    cut_at: int | None
    chunks: list[GenChunk] = field(default_factory=list)


def cases(rng: random.Random, count: int) -> list[Case]:
    """Requests of few prompts and seeds, so that answers repeat each other for a while and then differ."""
    made = []
    for index in range(count):
        options = dict(rng.choice(OPTIONS))
        options["max_tokens"] = max(rng.randint(1, 30), int(str(options.get("min_tokens", 0))))
        sampling = SamplingParams(
            **{"temperature": 0.4, "ignore_eos": True, "seed": rng.randint(1, 3)} | options  # type: ignore[arg-type]
        )
        start = rng.randint(0, 2)
        prompt = [(7 * start + at * at) % 9 + 60 for at in range(rng.choice([1, 9, 30]))]
        request = GenRequest(
            request_id=f"r{index}",
            prompt=prompt,
            sampling=sampling,
            lora=rng.choice([None, None, "tuned"]),
            cache_salt=rng.choice(["", "", "other"]),
            priority=rng.choice([0, 0, 1]),
        )
        can_move = sampling.num_samples == 1
        moved, cut = (rng.choice([None, None, rng.randint(2, 9)]) for _ in "ab")
        made.append(Case(request, rng.randint(0, 60), moved if can_move else None, cut if can_move else None))
    return made


def start(model_dir: Path, adapter: Path, **options: object) -> EngineCore:
    fields = {"model_dir": str(model_dir), "block_size": 4, "deterministic": True, "max_waiting": 500}
    core = EngineCore(EngineConfig.parse(fields | options, where="test"))
    operations.load_lora(core, "tuned", str(adapter))
    return core


def play(cores: list[EngineCore], todo: list[Case]) -> None:
    """Runs the cases on the first engine; those that move end on the second. A cut one is aborted and sent again."""
    here, there = cores
    by_id = {case.request.request_id: case for case in todo}
    step = 0
    while step < 70 or here.has_work or there.has_work:
        for case in todo:
            request = case.request
            live = here.request_ids
            if case.at == step:
                here.add(request, list(request.prompt))
            elif case.moved_at is not None and case.at + case.moved_at == step and request.request_id in live:
                handle = export_kv(here, request.request_id)
                here.drain_outputs()
                import_kv(there, handle, request, list(request.prompt))
            elif case.cut_at is not None and case.at + case.cut_at == step and request.request_id in live:
                here.abort(request.request_id)
                here.drain_outputs()
                progress = StreamProgress(request)
                for chunk in case.chunks:
                    progress.add(chunk)
                here.add(progress.resumed(), list(request.prompt))
        for core in cores:
            for output in core.step():
                assert isinstance(output, GenChunk), output
                by_id[output.request_id].chunks.append(output)
        step += 1
        assert step < 2000


def outcome(case: Case) -> list[object]:
    found: list[object] = [case.chunks[-1].usage and case.chunks[-1].usage.completion_tokens]
    for index in range(case.request.sampling.n):
        mine = [chunk for chunk in case.chunks if chunk.index == index]
        found += [
            [token for chunk in mine for token in chunk.token_ids],
            "".join(chunk.text for chunk in mine),
            [chunk.finish_reason for chunk in mine if chunk.finish_reason],
            [each for chunk in mine for each in chunk.logprobs or ()],
            [each for chunk in mine for each in chunk.prompt_logprobs or ()],
        ]
    return found


@pytest.mark.parametrize("condition", CONDITIONS)
def test_answers_are_those_without_speculation(
    condition: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")
    monkeypatch.setattr(ModelRunner, "swap_cost", lambda self: SwapCost(0.01) if condition == "swap" else None)
    adapter, options = save_adapter(tmp_path / "adapter"), CONDITIONS[condition]
    outcomes = []
    for speculation in ("off", "ngram", "auto", "model"):
        sources: dict[str, object] = {"speculation": speculation}
        if speculation == "model":
            sources = {"speculation": "auto", "draft_model": str(model_dir)}
        cores = [start(model_dir, adapter, **sources, **options) for _ in "ab"]
        found = []
        for seed in (1, 2):
            todo = cases(random.Random(seed), 36)
            play(cores, todo)
            found += [outcome(case) for case in todo]
        outcomes.append(found)
        for core in cores:
            core.pool.check([], [])
            assert core.stats().failed == 0
        source = {"ngram": "ngram", "auto": "answers", "model": "model"}.get(speculation)
        for each in cores[0].stats().speculation:
            assert each.source != source or 0 < each.accepted_tokens < each.draft_tokens
        if "num_blocks" in options:
            assert cores[0].stats().preemptions > 0
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == outcomes[2]
    assert outcomes[0] == outcomes[3]


def test_a_step_that_fails_is_repeated_without_its_draft(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.3, seed=1, max_tokens=40, ignore_eos=True, repetition_penalty=1.01)
    expected = LLM(model_dir, speculation="off", deterministic=True).generate([[5] * 9], params)[0].token_ids
    logits, failed = ModelRunner.logits, list[ScheduledChunk]()

    def failing(self: ModelRunner, chunks: list[ScheduledChunk], more_rows: list[int]) -> object:
        drafts = [chunk for chunk in chunks if chunk.draft]
        failed.extend(drafts)
        if drafts:
            raise MemoryError("no room for so many rows")
        return logits(self, chunks, more_rows)

    llm = LLM(model_dir, speculation="auto", deterministic=True)
    llm.generate([[5] * 9], params)
    monkeypatch.setattr(ModelRunner, "logits", failing)
    assert llm.generate([[5] * 9], params)[0].token_ids == expected
    assert failed


def test_what_one_salt_has_generated_is_never_drafted_under_another(model_dir: Path) -> None:
    core = EngineCore(EngineConfig.parse({"model_dir": str(model_dir), "speculation": "auto"}, where="test"))
    request = GenRequest(
        request_id="r", prompt=[5, 6, 7, 8], sampling=SamplingParams(temperature=1.0, seed=1, max_tokens=40)
    )

    def answers(salt: str) -> int:
        core.add(replace(request, cache_salt=salt), list(request.prompt))
        while core.has_work:
            core.step()
        (count,) = (each.draft_tokens for each in core.stats().speculation if each.source == "answers")
        return count

    assert answers("mine") == 0
    assert answers("yours") == 0
    assert answers("mine") > 0


def test_tokens_behind_a_stop_string_are_neither_sent_nor_counted(model_dir: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm = LLM(model_dir, speculation="auto", deterministic=True)
    whole = llm.generate([[9, 8, 7]], params)[0]
    stopped = replace(params, stop=(whole.text[12:15],))
    expected = LLM(model_dir, speculation="off", deterministic=True).generate([[9, 8, 7]], stopped)[0]
    found = llm.generate([[9, 8, 7]], stopped)[0]
    assert (found.text, found.token_ids, found.usage.completion_tokens) == (
        expected.text,
        expected.token_ids,
        expected.usage.completion_tokens,
    )
    assert sum(each.accepted_tokens for each in llm.stats().speculation) > 0
