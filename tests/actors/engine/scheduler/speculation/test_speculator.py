"""The rule drafts where it pays, and only there."""

import random
from collections.abc import Sequence as Items
from typing import Any

import pytest

from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.scheduler.speculation import speculator as speculator_module
from raytide.actors.engine.scheduler.speculation.answer_history import AnswerHistories
from raytide.actors.engine.scheduler.speculation.speculator import Speculator
from raytide.actors.engine.scheduler.step_cost import StepCost
from raytide.actors.engine.sequence import ScheduledChunk, Sequence, StepPlan

GREEDY = SamplingParams(temperature=0)


class Costs(StepCost):
    """Seconds of a machine that computes `free` rows in the time of one."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def seconds(self, rows: int) -> float:
        return max(1.0, rows / self.free)


def sequence(name: str, prompt: list[int], salt: bytes = b"") -> Sequence:
    return Sequence(name, list(prompt), len(prompt), GREEDY, 10_000, frozenset(), 0, salt=salt)


def generate(speculator: Speculator, texts: Items[Items[int]], prompt: list[int], salt: bytes = b"") -> tuple[int, int]:
    """Lets sequences of one prompt generate these texts, one token after the other. Returns the steps and rows."""
    seqs = [sequence(f"s{at}", prompt, salt) for at in range(len(texts))]
    steps = rows = 0
    while any(seq.output_len < len(text) for seq, text in zip(seqs, texts, strict=True)):
        going = [(seq, text) for seq, text in zip(seqs, texts, strict=True) if seq.output_len < len(text)]
        chunks = [ScheduledChunk(seq, len(seq.tokens) - 1, 1) for seq, _ in going]
        speculator.add_drafts(chunks, len(chunks), 512, lambda seq, count: count)
        right: dict[str, int] = {}
        for (seq, text), chunk in zip(going, chunks, strict=True):
            at = seq.output_len
            run = [text[at]]
            for guess in chunk.draft:
                if run[-1] != guess or at + len(run) >= len(text):
                    break
                run.append(text[at + len(run)])
            right[seq.seq_id] = len(run) - 1
            seq.tokens += run
        plan = StepPlan(chunks)
        speculator.observe(plan, right.__getitem__)
        steps, rows = steps + 1, rows + plan.num_tokens
    for seq in seqs:
        speculator.forget(seq)
    return steps, rows


def edited(rng: random.Random, text: list[int]) -> list[int]:
    """A text with every tenth line of ten tokens replaced."""
    lines = [text[at : at + 10] for at in range(0, len(text), 10)]
    return [each for line in lines for each in (line if rng.random() > 0.1 else [rng.randrange(5000) for _ in line])]


def test_an_edited_text_is_copied_in_a_third_of_the_steps() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(5000) for _ in range(600)]
    steps, rows = generate(
        Speculator(("ngram",), lambda seq, draft: len(draft), cost=Costs(8)), [edited(rng, prompt)], prompt
    )
    assert steps < 200
    assert rows < 2 * 600


def test_a_text_without_repetitions_is_not_drafted() -> None:
    text = random.Random(0).sample(range(5000), 400)
    speculator = Speculator(("ngram", "answers"), lambda seq, draft: len(draft), cost=Costs(8))
    assert generate(speculator, [text], [5001, 5002, 5003]) == (400, 400)


def test_repetitions_that_lead_elsewhere_each_time_are_not_drafted_for_long() -> None:
    rng = random.Random(0)
    text = [token for _ in range(150) for token in (1, 2, 3, 4, rng.randrange(10, 5000))]
    speculator = Speculator(("ngram",), lambda seq, draft: len(draft), cost=Costs(2))
    _, rows = generate(speculator, [text], [1, 2, 3])
    (counts,) = speculator.counts
    assert counts.draft_tokens - counts.accepted_tokens < 0.15 * len(text)
    assert rows < 1.2 * len(text)


@pytest.mark.parametrize("free", [1, 8])
def test_rows_that_fill_the_machine_leave_no_room_for_drafts(free: int) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(5000) for _ in range(60)]
    texts = [list(prompt) for _ in range(8)]
    speculator = Speculator(("ngram",), lambda seq, draft: len(draft), cost=Costs(free))
    assert generate(speculator, texts, prompt) == (60, 480)


def test_an_answer_is_found_in_a_later_request_of_its_salt_alone() -> None:
    rng = random.Random(0)
    text = [rng.randrange(5000) for _ in range(200)]
    speculator = Speculator(("ngram", "answers"), lambda seq, draft: len(draft), cost=Costs(8))
    assert generate(speculator, [text], [1, 2, 3])[0] == 200
    assert generate(speculator, [text], [1, 2, 3], b"other")[0] == 200
    assert generate(speculator, [text], [1, 2, 3])[0] < 60


def test_the_samples_of_a_long_prompt_are_indexed_one_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator_module, "_INDEXED_TOKENS", 40)
    asked: list[int] = []

    class Model:
        def num_missing(self, seq: Sequence) -> int:
            return 1

        def seconds(self, rows: int) -> float:
            return 0.0

        def draft(self, seqs: list[Sequence], counts: list[int]) -> list[list[int]]:
            asked.append(len(seqs))
            return [[] for _ in seqs]

    model: Any = Model()
    speculator = Speculator(("ngram", "model"), lambda seq, draft: len(draft), cost=Costs(512), model=model)
    seqs = [sequence(f"s{at}", [1, 2, 3, 4] * 15) for at in range(4)]
    known = []
    for _ in range(4):
        for seq in seqs:
            seq.tokens.append(seq.tokens[-4])
        chunks = [ScheduledChunk(seq, len(seq.tokens) - 1, 1) for seq in seqs]
        speculator.add_drafts(chunks, 4, 512, lambda seq, count: count)
        known.append([chunk.seq.seq_id for chunk in chunks if chunk.draft])
    assert known == [["s0"], ["s0", "s1"], ["s0", "s1", "s2"], ["s0", "s1", "s2", "s3"]]
    assert asked == []


def test_drafts_are_cut_where_the_grammar_forbids_them() -> None:
    text = [1, 2, 3, 4] * 30
    speculator = Speculator(("ngram",), lambda seq, draft: min(len(draft), 2), cost=Costs(8))
    seq = sequence("s", text)
    seq.grammar = object()  # type: ignore[assignment]
    longest = 0
    for token in text:
        chunk = ScheduledChunk(seq, len(seq.tokens) - 1, 1)
        speculator.add_drafts([chunk], 1, 512, lambda seq, count: count)
        longest = max(longest, len(chunk.draft))
        seq.tokens.append(token)
    assert longest == 2


def test_the_answers_kept_are_bounded_over_all_salts_and_the_oldest_go() -> None:
    histories = AnswerHistories(most_tokens=3000)
    for salt in range(40):
        seq = sequence("s", [1, 2, 3], bytes([salt]))
        seq.tokens += range(500)
        histories.add(seq)
        assert sum(each.num_tokens for each in histories._by_salt.values()) <= 3000
    assert bytes([39]) in histories._by_salt
    assert bytes([0]) not in histories._by_salt


def test_the_answers_of_one_salt_are_bounded_and_the_latest_stay() -> None:
    histories = AnswerHistories(most_tokens=1 << 20)
    for at in range(200):
        seq = sequence("s", [1, 2, 3])
        seq.tokens += range(1000 * at + 10, 1000 * at + 510)
        histories.add(seq)
    assert histories.of(b"").num_tokens < 1 << 15
    match = histories.of(b"").find(list(range(199_010, 199_100)))
    assert match is not None
    assert match.draft(3) == [199_100, 199_101, 199_102]
