"""A request that moves to another engine goes on with the very tokens that it would have had."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.actors.engine.families import save_family
from tests.actors.engine.tiny import save_adapter

from raytide.actors.engine import LLM, EngineConfig, GenRequest, SamplingParams
from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.operations import export_kv, import_kv
from raytide.actors.engine.kv_cache.handle import KvHandle
from raytide.actors.engine.types import FinishReason
from raytide.core.errors import ConflictError, DataError, NotFoundError, UsageError

PROMPT = list(range(40, 75))
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=24, ignore_eos=True, repetition_penalty=1.2)


def start(model_dir: Path, **options: object) -> EngineCore:
    fields = {"model_dir": str(model_dir), "block_size": 4, "max_batch_tokens": 16, "max_running": 4, "seed": 5}
    return EngineCore(EngineConfig.parse(fields | options, where="test"))


def ask(name: str = "r", sampling: SamplingParams = GREEDY) -> GenRequest:
    return GenRequest(request_id=name, prompt=PROMPT, sampling=sampling)


def run(loop: EngineCore, steps: int | None = None) -> tuple[list[int], str, FinishReason | None]:
    """Tokens, text and the end of request "r"."""
    tokens, text, reason = list[int](), "", None
    while loop.has_work and steps != 0:
        for output in loop.step():
            if output.request_id == "r":
                tokens += output.token_ids  # type: ignore[union-attr]
                text += output.text  # type: ignore[union-attr]
                reason = output.finish_reason  # type: ignore[union-attr]
        steps = None if steps is None else steps - 1
    return tokens, text, reason


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seed of the engine"])
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 9, 20])
def test_it_goes_on_at_any_point(model_dir: Path, sampling: SamplingParams, steps: int) -> None:
    whole = start(model_dir)
    whole.add(ask(sampling=sampling), PROMPT)
    tokens, text, _ = run(whole)
    here, there = start(model_dir), start(model_dir, seed=77)
    here.add(ask(sampling=sampling), PROMPT)
    first = run(here, steps)
    handle = KvHandle.from_bytes(export_kv(here, "r").to_bytes())
    last = here.drain_outputs()[-1]
    assert (last.finish_reason, here.stats().free_blocks) == ("abort", here.stats().num_blocks)  # type: ignore[union-attr]
    there.add(ask("busy", sampling=GREEDY), PROMPT[::-1])
    run(there, 2)
    import_kv(there, handle, ask(sampling=sampling), PROMPT)
    soon = run(there, 1)
    rest = run(there)
    assert first[0] + soon[0] + rest[0] == tokens
    assert first[1] + soon[1] + rest[1] == text
    assert rest[2] == "length"
    assert len(soon[0]) == (1 if steps >= 3 else 0)  # its KV came along: of 35 tokens each step computes 16
    assert there.stats().free_blocks == there.stats().num_blocks


def test_where_there_is_no_room_it_is_computed_again(model_dir: Path) -> None:
    expected = LLM(model_dir, block_size=4).generate([PROMPT], GREEDY)[0].token_ids
    here, there = start(model_dir), start(model_dir, num_blocks=16, max_running=2)
    here.add(ask(), PROMPT)
    first = run(here, 6)[0]
    there.add(ask("busy"), PROMPT)
    run(there, 3)
    import_kv(there, export_kv(here, "r"), ask(), PROMPT)
    assert there.stats().waiting == 1
    assert first + run(there)[0] == expected


def test_an_import_that_fails_leaves_nothing_behind(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = start(model_dir), start(model_dir)
    here.add(ask(), PROMPT)
    first = run(here, 6)[0]
    handle = export_kv(here, "r")

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as full:
        full.setattr(there.runner.cache, "write", fails)
        with pytest.raises(MemoryError):
            import_kv(there, handle, ask(), PROMPT)
    assert (there.has_work, there.stats().free_blocks) == (False, there.stats().num_blocks)
    import_kv(there, handle, ask(), PROMPT)
    assert first + run(there)[0] == LLM(model_dir, block_size=4).generate([PROMPT], GREEDY)[0].token_ids


def test_text_held_back_for_a_stop_string_is_held_back_there_too(model_dir: Path) -> None:
    text = LLM(model_dir, block_size=4).generate([PROMPT], GREEDY)[0].text
    stop = text[8:13]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=stop)
    for steps in range(3, 9):
        here, there = start(model_dir), start(model_dir)
        here.add(ask(sampling=sampling), PROMPT)
        first = run(here, steps)[1]
        if not here.has_work:
            break
        import_kv(there, export_kv(here, "r"), ask(sampling=sampling), PROMPT)
        assert first + run(there)[1] == text[: text.index(stop)]
    assert steps > 4


@pytest.mark.parametrize(
    ("options", "names"), [({"block_size": 8}, "layout"), ({"dtype": "bfloat16"}, "dtype")], ids=["blocks", "dtype"]
)
def test_an_engine_of_another_layout_refuses_it(model_dir: Path, options: dict[str, object], names: str) -> None:
    here, there = start(model_dir), start(model_dir, **options)
    here.add(ask(), PROMPT)
    run(here, 5)
    with pytest.raises(ConflictError, match=names):
        import_kv(there, export_kv(here, "r"), ask(), PROMPT)
    assert (there.request_ids, there.stats().free_blocks) == ([], there.stats().num_blocks)


def test_kv_that_was_rotated_by_other_factors_is_refused(tmp_path: Path) -> None:
    save_family(tmp_path, "phi3-longrope")  # of 128 positions, stretched to 256
    here, alike, longer = (start(tmp_path, max_model_len=most) for most in (64, 128, 256))
    here.add(ask(), PROMPT)
    run(here, 5)
    handle = export_kv(here, "r")
    with pytest.raises(ConflictError, match="this KV has model"):
        import_kv(longer, handle, ask(), PROMPT)
    import_kv(alike, handle, ask(), PROMPT)


def test_another_prompt_more_samples_or_none_are_refused(model_dir: Path) -> None:
    here, there = start(model_dir), start(model_dir)
    here.add(ask(), PROMPT)
    run(here, 5)
    handle = export_kv(here, "r")
    with pytest.raises(UsageError, match="not the one"):
        import_kv(there, handle, ask(), [*PROMPT, 1])
    with pytest.raises(UsageError, match="not the one"):
        import_kv(there, handle, ask(sampling=SamplingParams(n=2)), PROMPT)
    with pytest.raises(NotFoundError):
        export_kv(here, "r")
    here.add(ask(sampling=SamplingParams(n=2)), PROMPT)
    with pytest.raises(ConflictError, match="2 samples"):
        export_kv(here, "r")
    import_kv(there, handle, ask(), PROMPT)
    with pytest.raises(ConflictError, match="already running"):
        import_kv(there, handle, ask(), PROMPT)


@pytest.mark.parametrize(("seed", "alpha", "same"), [(1, 8, True), (2, 8, False), (1, 16, False)])
def test_an_adapter_is_known_by_what_it_holds(
    model_dir: Path, tmp_path: Path, seed: int, alpha: int, same: bool
) -> None:
    here, there = start(model_dir), start(model_dir)
    operations.load_lora(here, "tuned", str(save_adapter(tmp_path / "here")))
    operations.load_lora(there, "tuned", str(save_adapter(tmp_path / "there", seed, alpha)))
    request = GenRequest(request_id="r", prompt=PROMPT, sampling=GREEDY, lora="tuned")
    here.add(request, PROMPT)
    first = run(here, 6)[0]
    handle = export_kv(here, "r")
    if same:
        import_kv(there, handle, request, PROMPT)
        here.add(request, PROMPT)
        assert first + run(there)[0] == run(here)[0]
    else:
        with pytest.raises(ConflictError, match="lora"):
            import_kv(there, handle, request, PROMPT)


def test_a_sleeping_engine_takes_it_and_computes_it_when_awake(model_dir: Path) -> None:
    here, there = start(model_dir), start(model_dir)
    here.add(ask(), PROMPT)
    first = run(here, 6)[0]
    operations.sleep(there, 1)
    import_kv(there, export_kv(here, "r"), ask(), PROMPT)
    operations.wake(there)
    assert first + run(there)[0] == LLM(model_dir, block_size=4).generate([PROMPT], GREEDY)[0].token_ids


@pytest.fixture(scope="module")
def data(model_dir: Path) -> bytes:
    loop = start(model_dir)
    loop.add(ask(), PROMPT)
    run(loop, 5)
    return export_kv(loop, "r").to_bytes()


@given(cut=st.integers(0, 10**6), at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_damaged_bytes_are_refused(data: bytes, cut: int, at: int, bit: int) -> None:
    flipped = bytearray(data)
    flipped[-1 - at % (len(data) // 2)] ^= 1 << bit
    for damaged in (data[: cut % len(data)], bytes(flipped), data + b"\0"):
        with pytest.raises(DataError, match="no KV handle"):
            KvHandle.from_bytes(damaged)
