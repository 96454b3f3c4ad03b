import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.engine.sampling_cases import VOCAB, sequence, shaped, support

from raytide.actors.engine.sampling.sampler import Sampler
from raytide.actors.engine.sampling_params import SamplingParams, Structured
from raytide.actors.engine.sequence import Sequence
from raytide.core.errors import UsageError

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=None,
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 7, 300])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8, 0.3])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.7, 0.6])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4)),
        min_tokens=draw(st.sampled_from([0, 0, 4, 50])),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
    )


@st.composite
def sequences(draw: st.DrawFn) -> list[Sequence]:
    found = []
    for place in range(draw(st.integers(1, 6))):
        tokens = draw(TOKENS)
        start = draw(st.integers(1, len(tokens)))
        tail = tuple(tokens[-draw(st.integers(1, 3)) :])
        words = draw(st.lists(st.sampled_from([(3,), (5, 6), (*tail, 7), (*tail, 8, 9)]), max_size=3, unique=True))
        found.append(sequence(f"s{place}", tokens, start, draw(sampling()), bad_words=tuple(words)))
    return found


def logits_of(seqs: list[Sequence], seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(len(seqs), VOCAB)).astype(np.float32) * 3)


@settings(max_examples=150, deadline=None)
@given(seqs=sequences(), seed=st.integers(0, 2**32))
def test_any_mix_of_options_gives_each_row_what_it_gets_alone_and_only_what_the_oracle_allows(
    seqs: list[Sequence], seed: int
) -> None:
    rows = logits_of(seqs, seed)
    together = Sampler().sample(rows.clone(), seqs)
    backwards = Sampler().sample(rows.flip(0).clone(), seqs[::-1])[::-1]
    for place, seq in enumerate(seqs):
        alone = Sampler().sample(rows[place : place + 1].clone(), [seq])
        assert together[place] == backwards[place] == alone[0]
        expected = shaped(rows[place].numpy(), seq)
        token = together[place].token
        if seq.params.is_greedy:
            assert expected[token] == pytest.approx(expected.max(), abs=1e-4)
            continue
        # float32 may round the nucleus's edge by one token
        rank = int((expected > expected[token]).sum())
        assert rank < len(support(expected, seq.params)) + (seq.params.top_p < 1)


@settings(max_examples=50, deadline=None)
@given(params=sampling(), tokens=TOKENS, seed=st.integers(0, 2**32))
def test_a_sampler_that_forgets_between_steps_goes_on_as_one_that_does_not(
    params: SamplingParams, tokens: list[int], seed: int
) -> None:
    """A preempted sequence is forgotten, and learned again from its tokens."""
    steady, forgetful = Sampler(), Sampler()
    seq = sequence("s", list(tokens), len(tokens), params, bad_words=((4, 5), (6,)))
    for step in range(6):
        rows = logits_of([seq], seed + step)
        expected = steady.sample(rows.clone(), [seq])
        forgetful.forget(seq)
        assert forgetful.sample(rows, [seq]) == expected
        seq.tokens.append(expected[0].token)


def test_penalties_are_openais_and_ctrls() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    params = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    Sampler().sample(logits, [sequence("s", [0, 1, 2, 2], 2, params)])
    assert logits[0].tolist() == pytest.approx([1.0, -4.0, 0.5 - 2 * 0.5 - 0.25, 0.5])


def test_penalty_counts_follow_a_growing_sequence() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    seq, sampler = sequence("s", [0], 1, params), Sampler()
    for token in (3, 3, 1):
        sampler.sample(torch.zeros(1, 4), [seq])
        seq.tokens.append(token)
    logits = torch.zeros(1, 4)
    sampler.sample(logits, [seq])
    assert logits[0].tolist() == [0.0, -1.0, 0.0, -2.0]


def test_no_end_comes_before_min_tokens_and_any_may_after() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,))
    seq, sampler, chosen = sequence("s", [5], 1, params, ends=frozenset({0})), Sampler(), []
    for _ in range(3):
        (sampled,) = sampler.sample(torch.tensor([[9.0, 8.0, 7.0, 0.0, 0.0, 0.0]]), [seq])
        chosen.append(sampled.token)
        seq.tokens.append(sampled.token)
    assert chosen == [2, 2, 0]


def test_a_bad_word_is_never_completed_but_its_beginning_may_stand() -> None:
    seq, sampler = sequence("s", [5], 1, SamplingParams(temperature=0), bad_words=((2, 1), (4,))), Sampler()
    for _ in range(3):
        (sampled,) = sampler.sample(torch.tensor([[0.0, 8.0, 9.0, 7.0, 99.0, 0.0]]), [seq])
        seq.tokens.append(sampled.token)
        logits = torch.tensor([[0.0, 9.0, 8.0, 7.0, 99.0, 0.0]])
        (sampled,) = sampler.sample(logits, [seq])
        seq.tokens.append(sampled.token)
    assert seq.tokens[1:] == [2, 2, 2, 2, 2, 2]


def test_a_row_of_which_every_token_is_banned_fails_alone() -> None:
    seqs = [
        sequence("all", [1], 1, SamplingParams(), bad_words=tuple((token,) for token in range(4))),
        sequence("some", [1], 1, SamplingParams(temperature=0), bad_words=((3,),)),
    ]
    banned, chosen = Sampler().sample(torch.tensor([[0.0, 1, 2, 3]] * 2), seqs)
    assert banned.token == -1
    assert isinstance(banned.error, UsageError)
    assert (chosen.token, chosen.error) == (2, None)


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_told_apart_by_row(temperatures: tuple[float, ...], value: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1] = value
    seqs = [sequence(str(i), [0], 1, SamplingParams(temperature=each)) for i, each in enumerate(temperatures)]
    tokens = [each.token for each in Sampler().sample(logits, seqs)]
    assert tokens[1] == -1
    assert min(tokens[0], tokens[2]) >= 0


def test_a_plain_greedy_batch_looks_at_no_sequence_after_its_first_step() -> None:
    seqs = [sequence(str(i), [0], 1, SamplingParams(temperature=0)) for i in range(3)]
    sampler, logits = Sampler(), torch.eye(3, 5)
    first = sampler.sample(logits.clone(), seqs)
    for seq in seqs:
        del seq.params
    assert [each.token for each in sampler.sample(logits.clone(), seqs)] == [each.token for each in first] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", float("nan")),
        ("stop", ("",)),
        ("bad_words", ("",)),
        ("min_tokens", 200),
        ("logit_bias", {1: float("nan")}),
        ("logprobs", 21),
        ("best_of", 0),
        ("seed", 2**70),
    ],
)
def test_a_bad_parameter_is_named(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [("choice", ()), ("choice", ("",)), ("choice", "yes"), ("regex", ("a",)), ("regex", "")]
)
def test_a_structure_without_content_is_refused(bad: tuple[object, object]) -> None:
    with pytest.raises(UsageError, match="structured"):
        Structured(*bad)  # type: ignore[arg-type]
