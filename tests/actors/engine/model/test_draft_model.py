"""A draft model guesses what it would generate itself, whatever has happened to its sequences."""

from pathlib import Path

import pytest
from tests.actors.engine.tiny import VOCAB, save_llama

from raytide.actors.engine import LLM, EngineConfig, GenRequest, SamplingParams
from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.model.draft_model import DraftModel
from raytide.actors.engine.types import DraftCounts
from raytide.core.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPT = [(7 * at) % (VOCAB - 1) + 1 for at in range(20)]

pytestmark = pytest.mark.usefixtures("free_drafts")


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose guesses are wrong."""
    path = tmp_path_factory.mktemp("other")
    save_llama(path, num_hidden_layers=1)
    return path


def start(model_dir: Path, draft_dir: Path, **options: object) -> EngineCore:
    fields = {"model_dir": str(model_dir), "draft_model": str(draft_dir), "speculation": "auto"}
    fields |= {"block_size": 4, "deterministic": True}
    return EngineCore(EngineConfig.parse(fields | options, where="test"))


def counts_of(core: EngineCore) -> DraftCounts:
    return next(each for each in core.stats().speculation if each.source == "model")


def add(core: EngineCore, name: str, prompt: list[int] = PROMPT) -> None:
    core.add(GenRequest(request_id=name, prompt=prompt, sampling=GREEDY), prompt)


def finish(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)  # type: ignore[union-attr]
    return tokens


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[int]:
    return LLM(model_dir, speculation="off", deterministic=True).generate([PROMPT], GREEDY)[0].token_ids


def test_a_model_that_drafts_for_itself_is_always_right(model_dir: Path, expected: list[int]) -> None:
    core = start(model_dir, model_dir)
    add(core, "r")
    assert finish(core) == {"r": expected}
    counts = counts_of(core)
    assert counts.draft_tokens == counts.accepted_tokens > 0
    assert core.stats().steps < 40


def test_a_prefix_found_in_the_cache_has_its_guesses_too(model_dir: Path, expected: list[int]) -> None:
    core = start(model_dir, model_dir)
    for name in ("first", "second"):
        add(core, name)
        assert finish(core) == {name: expected}
    assert core.stats().cached_tokens > 0
    counts = counts_of(core)
    assert counts.draft_tokens == counts.accepted_tokens


def test_sleep_and_eviction_lose_no_right_guess(model_dir: Path, expected: list[int]) -> None:
    core = start(model_dir, model_dir, num_blocks=26, max_model_len=100, prefix_cache=False)
    for at in range(3):
        add(core, f"r{at}")
    assert finish(core) == {f"r{at}": expected for at in range(3)}
    assert core.stats().preemptions > 0
    for level in (1, 2):
        add(core, f"slept {level}", [level, *PROMPT])
        for _ in range(4):
            core.step()
        operations.sleep(core, level)  # type: ignore[arg-type]
        operations.wake(core)
        finish(core)
    counts = counts_of(core)
    assert counts.draft_tokens == counts.accepted_tokens > 0


def test_a_wrong_guess_is_computed_again_after_steps_without_room_for_drafts(model_dir: Path) -> None:
    core = start(model_dir, model_dir)
    add(core, "r")
    core.step()
    (seq,) = core.scheduler.running
    seq.block_ids += core.pool.allocate(4)
    model = core.runner.draft_model
    assert model is not None
    ((guess, *_),) = model.draft([seq], [3])
    seq.tokens.append(guess + 1)
    assert model.draft([seq], [0]) == [[]]
    seq.tokens.append(7)
    after = model.draft([seq], [8])
    model.release(seq)
    assert model.draft([seq], [8]) == after


def test_a_model_that_is_always_wrong_changes_nothing_and_is_given_up(
    model_dir: Path, other_dir: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start(model_dir, other_dir)
    add(core, "r")
    assert finish(core) == {"r": expected}
    assert counts_of(core).draft_tokens > counts_of(core).accepted_tokens
    assert core.stats().failed == 0


def test_a_draft_model_that_fails_is_not_asked_again(
    model_dir: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def failing(self: DraftModel, seqs: list[object], counts: list[int]) -> list[list[int]]:
        calls.append(len(seqs))
        raise RuntimeError("no memory for the draft model")

    monkeypatch.setattr(DraftModel, "draft", failing)
    core = start(model_dir, model_dir)
    add(core, "r")
    assert finish(core) == {"r": expected}
    assert calls == [1]


def test_another_vocabulary_is_refused(model_dir: Path, tmp_path: Path) -> None:
    save_llama(tmp_path, vocab_size=VOCAB + 8)
    with pytest.raises(ConfigError, match="another vocabulary"):
        start(model_dir, tmp_path)


def test_too_short_a_context_is_refused_with_the_remedy(model_dir: Path, tmp_path: Path) -> None:
    save_llama(tmp_path, max_position_embeddings=64)
    with pytest.raises(ConfigError, match="64 positions") as refused:
        start(model_dir, tmp_path)
    assert "max_model_len" in str(refused.value.hint)


def test_a_draft_model_without_speculation_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        start(model_dir, model_dir, speculation="ngram")
