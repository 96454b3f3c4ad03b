"""Sequences and rows of logits for tests of the sampler, and its oracle: one row at a time, numpy, float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.sequence import Sequence
from raytide.actors.engine.text.bad_words import BadWords

VOCAB = 200
Row = npt.NDArray[np.float64]


def sequence(
    name: str,
    tokens: list[int],
    prompt_len: int,
    params: SamplingParams,
    *,
    seed: int = 0,
    ends: frozenset[int] = frozenset(),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sequence:
    return Sequence(
        name,
        tokens,
        prompt_len,
        params,
        1000,
        ends | frozenset(params.stop_token_ids),
        params.seed if params.seed is not None else seed,
        bad_words=BadWords(bad_words),
    )


def shaped(logits: Row, seq: Sequence) -> Row:
    """The row after bias, penalties and bans."""
    row, params = logits.astype(np.float64).copy(), seq.params
    for token, bias in params.logit_bias.items():
        row[token] += bias
    output = seq.tokens[seq.prompt_len :]
    for token in set(seq.tokens):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        row[list(seq.stop_token_ids)] = -np.inf
    for word in seq.bad_words or ():
        if output[len(output) - len(word) + 1 :] == list(word[:-1]) and len(output) >= len(word) - 1:
            row[word[-1]] = -np.inf
    return row


def support(logits: Row, params: SamplingParams) -> set[int]:
    """Returns the tokens that the filters may leave, by sorting everything."""
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    mass = np.cumsum(probs[order]) / probs[order].sum()
    kept = order[: int(np.searchsorted(mass, params.top_p - 1e-9)) + 1] if params.top_p < 1 else order
    return {
        int(token) for token in kept if probs[token] > 0 and probs[token] >= params.min_p * probs.max() * (1 - 1e-6)
    }
