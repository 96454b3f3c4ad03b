from pathlib import Path

import numpy as np
import pytest
import torch

from raytide.actors.engine import LLM, EngineConfig, GenChunk, GenRequest, SamplingParams
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.sampling.logprobs import token_logprobs

PROMPT = [5, 9, 301, 44, 17, 80, 2, 2, 91]


def run(model_dir: Path, *requests: GenRequest, **options: object) -> dict[str, list[GenChunk]]:
    """Every chunk of requests that run together."""
    loop = EngineCore(EngineConfig.parse({"model_dir": str(model_dir), **options}, where="test"))
    chunks: dict[str, list[GenChunk]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert not isinstance(request.prompt, str)
        loop.add(request, request.prompt)
    while loop.has_work:
        for output in loop.step():
            assert isinstance(output, GenChunk)
            chunks[output.request_id].append(output)
    return chunks


def oracle(model_dir: Path, tokens: list[int]) -> np.ndarray:
    """[T, V] log probabilities of what follows each token."""
    logits = LLM(model_dir).logits(tokens).double().numpy()
    logits -= logits.max(-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def test_chosen_and_most_likely_tokens_have_the_models_own_figures(model_dir: Path) -> None:
    sampling = SamplingParams(max_tokens=6, seed=3, temperature=2.0, top_k=40, presence_penalty=1.0, logprobs=4)
    chunks = run(model_dir, GenRequest(request_id="a", prompt=PROMPT, sampling=sampling))["a"]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    expected = oracle(model_dir, PROMPT + tokens)
    for place, chunk in enumerate(chunks):
        assert chunk.logprobs is not None
        (found,) = chunk.logprobs
        row = expected[len(PROMPT) - 1 + place]
        assert found.token_id == chunk.token_ids[0]
        assert found.logprob == pytest.approx(row[found.token_id], abs=1e-4)
        assert found.rank == 1 + int((row > row[found.token_id]).sum())
        assert [token for token, _ in found.top] == np.argsort(-row, kind="stable")[:4].tolist()
        assert [value for _, value in found.top] == pytest.approx(np.sort(row)[::-1][:4], abs=1e-4)


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_figures_cover_every_position_in_chunks_and_with_a_warm_cache(model_dir: Path, budget: int) -> None:
    plain = SamplingParams(max_tokens=2, temperature=0)
    asking = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    chunks = run(
        model_dir,
        GenRequest(request_id="warms", prompt=PROMPT, sampling=plain),
        GenRequest(request_id="a", prompt=PROMPT, sampling=asking),
        block_size=2,
        max_batch_tokens=budget,
        max_running=1 if budget == 64 else 3,
    )
    assert all(chunk.prompt_logprobs is None for chunk in [*chunks["warms"], *chunks["a"][1:]])
    found, expected = chunks["a"][0].prompt_logprobs, oracle(model_dir, PROMPT)
    assert found is not None
    assert found[0] is None
    assert [each.token_id for each in found[1:] if each] == PROMPT[1:]
    for place, each in enumerate(found[1:]):
        assert each is not None
        assert each.logprob == pytest.approx(expected[place][each.token_id], abs=1e-4)
        assert each.top[0][1] == pytest.approx(expected[place].max(), abs=1e-4)
        assert len(each.top) == 2


def test_a_prompt_of_one_token_has_its_place_among_the_figures(model_dir: Path) -> None:
    asking = SamplingParams(max_tokens=3, temperature=0, logprobs=0, prompt_logprobs=0)
    first, *others = run(model_dir, GenRequest(request_id="a", prompt=[5], sampling=asking))["a"]
    assert first.prompt_logprobs == (None,)
    assert [chunk.prompt_logprobs for chunk in others] == [None, None]


@pytest.mark.parametrize("vocab", [1, 20, 128, 129, 5000])
def test_the_most_likely_tokens_are_those_of_a_full_search(vocab: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(size=(3, vocab)).astype(np.float32))
    best = logits.log_softmax(-1).topk(min(20, vocab))
    found = token_logprobs(logits, range(3), [0, 0, 0], [20, 20, 20])
    expected = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    assert [each.top for each in found] == [tuple(zip(ids, values, strict=True)) for ids, values in expected]


def test_a_rows_figures_do_not_depend_on_the_other_rows() -> None:
    # Rounded, as bfloat16 leaves them, so that many are equal.
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(70, 300)).round(1).astype(np.float32))
    tokens, counts = list(range(70)), [row % 21 for row in range(70)]
    together = token_logprobs(logits, range(len(tokens)), tokens, counts)
    alone = [token_logprobs(logits, [row], [row], [row % 21])[0] for row in range(70)]
    assert together == alone
    assert [len(each.top) for each in together] == counts
