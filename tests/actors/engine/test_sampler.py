import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raytide.actors.engine.sampler import Sampler, uniform
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.sequence import Sequence
from raytide.core.errors import UsageError

VOCAB = 200


def sequence(name: str, tokens: list[int], prompt_len: int, params: SamplingParams, seed: int = 0) -> Sequence:
    return Sequence(
        name, tokens, prompt_len, params, 1000, frozenset(), params.seed if params.seed is not None else seed
    )


def support(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """What the filters may leave, by sorting everything, in float64."""
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    mass = np.cumsum(probs[order]) / probs[order].sum()
    kept = order[: int(np.searchsorted(mass, params.top_p - 1e-9)) + 1] if params.top_p < 1 else order
    return {int(token) for token in kept if probs[token] >= params.min_p * probs.max() * (1 - 1e-6)}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    top_k=st.sampled_from([0, 1, 5, 100, 500]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_filters_leave_exactly_what_sorting_everything_leaves(
    seed: int, top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    from raytide.actors.engine.sampler import _filter

    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * scale
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    probs = torch.from_numpy(logits)[None].softmax(-1)
    left = {int(token) for token in _filter(probs, [sequence("a", [1], 1, params)])[0].nonzero()}
    expected = support(logits.astype(np.float64), params)
    assert len(left ^ expected) <= (1 if 0 < top_p < 1 else 0)  # float32 may round the nucleus's edge by one token
    assert int(logits.argmax()) in left


def test_a_rows_tokens_do_not_depend_on_the_other_rows() -> None:
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(size=(6, VOCAB)).astype(np.float32))
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=7),
        SamplingParams(seed=3, top_p=0.7),
        SamplingParams(seed=4, min_p=0.1, presence_penalty=1.0),
        SamplingParams(seed=5, repetition_penalty=1.3),
    ]
    seqs = [sequence(f"s{i}", [i, i + 1, i + 2], 1, each) for i, each in enumerate(params)]
    together = Sampler(VOCAB).sample(rows.clone(), seqs)
    alone = [Sampler(VOCAB).sample(rows[i : i + 1].clone(), [seq])[0] for i, seq in enumerate(seqs)]
    backwards = Sampler(VOCAB).sample(rows.flip(0).clone(), seqs[::-1])[::-1]
    assert together == alone == backwards


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    seqs = [sequence(str(i), [0], 1, SamplingParams(seed=i)) for i in range(4000)]
    with np.errstate(divide="ignore"):
        tokens = [each.token for each in Sampler(4).sample(probs.log().clamp_min(-1e9).expand(4000, 4).clone(), seqs)]
    counts = np.bincount(tokens, minlength=4) / 4000
    assert counts[1] == 0
    assert np.abs(counts - probs.numpy()).max() < 0.03


def test_uniform_is_in_range_and_differs_by_seed_and_position() -> None:
    values = [uniform(seed, position) for seed in (-1, 0, 1, 2**62) for position in range(200)]
    assert len(set(values)) == len(values)
    assert 0 <= min(values) < 0.02
    assert 0.98 < max(values) < 1


def test_penalties_are_openais_and_ctrls() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    params = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    Sampler(4).sample(logits, [sequence("s", [0, 1, 2, 2], 2, params)])
    assert logits[0].tolist() == pytest.approx([1.0, -4.0, 0.5 - 2 * 0.5 - 0.25, 0.5])


def test_penalty_counts_follow_a_growing_sequence() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    seq, sampler = sequence("s", [0], 1, params), Sampler(4)
    for token in (3, 3, 1):
        sampler.sample(torch.zeros(1, 4), [seq])
        seq.tokens.append(token)
    logits = torch.zeros(1, 4)
    sampler.sample(logits, [seq])
    assert logits[0].tolist() == [0.0, -1.0, 0.0, -2.0]


def test_logits_that_are_not_finite_are_told_apart_by_row() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    seqs = [sequence(str(i), [0], 1, SamplingParams(temperature=float(i % 2))) for i in range(3)]
    tokens = [each.token for each in Sampler(4).sample(logits, seqs)]
    assert tokens[1] == -1
    assert min(tokens[0], tokens[2]) >= 0


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
        ("seed", 2**70),
    ],
)
def test_a_bad_parameter_is_named(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
