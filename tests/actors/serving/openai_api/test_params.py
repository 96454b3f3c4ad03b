"""Fields that clients send with the values that change nothing, and the ends of ranges."""

from __future__ import annotations

import pytest

from raytide.actors.serving.openai_api.errors import ApiError
from raytide.actors.serving.openai_api.params import refuse_unknown, sampling_of
from raytide.actors.serving.openai_api.wire import ChatRequest


def chat(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})


def test_a_top_p_of_0_leaves_the_most_likely_token() -> None:
    assert 0.0 < sampling_of(chat(top_p=0)).top_p < 1e-6
    assert sampling_of(chat(top_p=0.5)).top_p == 0.5
    assert sampling_of(chat()).top_p == 1.0


@pytest.mark.parametrize(
    ("field", "neutral", "other"),
    [
        ("skip_special_tokens", True, False),
        ("spaces_between_special_tokens", True, False),
        ("echo", False, True),
        ("use_beam_search", False, True),
        ("length_penalty", 1.0, 2.0),
        ("logits_processors", [], ["x"]),
        ("suffix", "", "x"),
    ],
)
def test_defaults_of_vllms_fields_are_accepted_and_other_values_are_named(
    field: str, neutral: object, other: object
) -> None:
    refuse_unknown(chat(**{field: neutral}))
    with pytest.raises(ApiError) as refused:
        refuse_unknown(chat(**{field: other}))
    assert refused.value.body.error.param == field
    assert refused.value.body.error.message == f"{field} is not supported by this model server."


def test_the_schema_tells_the_type_of_a_field_that_only_other_requests_ignore() -> None:
    properties = ChatRequest.model_json_schema()["properties"]
    assert {"type": "null"} in properties["reasoning_effort"]["anyOf"]
    assert properties["metadata"] == {}


def test_the_stop_strings_of_continues_code_completion_are_taken() -> None:
    names = ("endoftext", "fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep", "im_end")
    stop = (*(f"<|{name}|>" for name in names), "/src/", "#- coding: utf-8", "```")
    assert sampling_of(chat(stop=list(stop))).stop == stop
