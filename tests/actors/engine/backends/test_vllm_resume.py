"""Requests that vLLM continues, as it gets them, and those that it cannot continue. The tests need no vLLM."""

import pytest

from raytide.actors.engine import GenRequest, SamplingParams, Structured
from raytide.actors.engine.backends.vllm.request import check_request, rest_of
from raytide.actors.engine.types import SampleProgress
from raytide.core.errors import UsageError

CUT = (SampleProgress((7, 8)),)


def test_the_rest_has_fewer_tokens_and_no_log_probabilities_of_the_prompt() -> None:
    rest = rest_of(SamplingParams(max_tokens=9, min_tokens=4, prompt_logprobs=1), 3)
    assert (rest.max_tokens, rest.min_tokens, rest.prompt_logprobs) == (6, 1, None)
    rest = rest_of(SamplingParams(max_tokens=None, min_tokens=2), 3)
    assert (rest.max_tokens, rest.min_tokens) == (None, 0)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"structured": Structured("regex", "a+")}, "structured"),
    ],
)
def test_options_with_a_state_of_their_own_are_refused_by_name(params: dict[str, object], name: str) -> None:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"cannot continue {name} from tokens"):
        check_request(GenRequest(request_id="r", prompt=[1], sampling=sampling, resume=CUT))
    check_request(GenRequest(request_id="r", prompt=[1], sampling=sampling))
    check_request(GenRequest(request_id="r", prompt=[1], sampling=sampling, resume=(SampleProgress(),)))


@pytest.mark.parametrize("params", [{}, {"temperature": 0, "seed": 1}, {"repetition_penalty": 1.2, "top_p": 0.5}])
def test_what_depends_on_the_tokens_alone_goes_on(params: dict[str, object]) -> None:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    check_request(GenRequest(request_id="r", prompt=[1], sampling=sampling, resume=CUT))
