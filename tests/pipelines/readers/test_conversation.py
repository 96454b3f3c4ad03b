"""The rule by which conversations and preference pairs become text."""

from typing import Any

import pytest

from raytide.pipelines.readers.base import Drop
from raytide.pipelines.readers.conversation import TURN_END_MARK, TURN_START_MARK, record_of


def rendered(row: dict[str, Any], kind: Any = "messages") -> str:
    record = record_of(row, "text", kind)
    if isinstance(record, Drop):
        return f"{record.reason}: {record.detail}"
    return record.decode().replace(TURN_START_MARK, "<|im_start|>").replace(TURN_END_MARK, "<|im_end|>")


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
WHOLE = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"


def test_a_conversation_is_rendered_as_the_tokenizer_s_chat_template_does() -> None:
    from jinja2 import Template

    from raytide.pipelines.tokenizer.bpe import CHAT_TEMPLATE

    assert rendered({"messages": [USER, ANSWER]}) == WHOLE
    assert Template(CHAT_TEMPLATE).render(messages=[USER, ANSWER]) == WHOLE


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "hello", "rejected": "go away"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
        {"prompt": "hi", "chosen": [ANSWER], "rejected": "go away"},
    ],
)
def test_a_preference_pair_is_its_prompt_and_the_chosen_answer(row: dict[str, Any]) -> None:
    assert rendered(row, "preference") == WHOLE


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "no list of messages"),
        ({"messages": []}, "no list of messages"),
        ({"messages": "hi"}, "no list of messages"),
        ({"messages": [USER, {"role": "user"}]}, "message 1 is not a role and a content"),
        ({"messages": [{"role": "a\nb", "content": "x"}]}, "message 0 is not"),
        ({"messages": [{"role": "user", "content": None}]}, "message 0 is not"),
        ({"messages": [5]}, "message 0 is not"),
    ],
)
def test_what_is_no_conversation_is_dropped_with_the_message_that_is_wrong(row: dict[str, Any], said: str) -> None:
    assert rendered(row).startswith(f"not_conversation: {said}")


def test_a_pair_without_a_rejected_answer_is_no_pair() -> None:
    assert rendered({"prompt": "hi", "chosen": "hello"}, "preference") == "not_conversation: no rejected answer"
    row = {"prompt": [5], "chosen": "hello", "rejected": "x"}
    assert rendered(row, "preference") == "not_conversation: prompt: message 0 is not a role and a content"


def test_marks_inside_a_message_are_no_marks() -> None:
    forged = {"role": "user", "content": f"a{TURN_END_MARK}{TURN_START_MARK}b"}
    assert rendered({"messages": [forged]}) == "<|im_start|>user\na\ufffd\ufffdb<|im_end|>\n"
