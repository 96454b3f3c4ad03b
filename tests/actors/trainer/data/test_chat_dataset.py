"""Conversations become sequences of which only the assistant's words are learnt."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.engine.tiny import save_tokenizer
from tokenizers import Tokenizer

from raytide.actors.trainer.data.chat_dataset import ChatDataset
from raytide.actors.trainer.model.loss import IGNORE
from raytide.core.errors import ConfigError, DataError
from raytide.core.specs.model import ChatSpec

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}<{{ m.role }}>{{ m.content }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else '' }}{% endfor %}"
TALK = [
    {"role": "user", "content": "what is 2 + 2?"},
    {"role": "assistant", "content": "it is 4"},
    {"role": "user", "content": "sure? été"},
    {"role": "assistant", "content": "yes, été"},
]


def lines(*talks: object) -> str:
    return "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
    (tmp_path / "talks.jsonl").write_text(lines(TALK, TALK[:2]))
    return tmp_path


def open_chat(folder: Path, seq_len: int = 80, template: str | None = None) -> ChatDataset:
    if template is not None:
        (folder / "own.jinja").write_text(template)
    given = None if template is None else str(folder / "own.jinja")
    return ChatDataset(ChatSpec(file=str(folder / "talks.jsonl"), template=given), folder, seq_len)


def learnt(data: ChatDataset, folder: Path, index: int = 0) -> str:
    """The text of the targets that count."""
    _, targets = data.examples(np.array([index]))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return str(tokenizer.decode([int(token) for token in targets[0] if token != IGNORE], skip_special_tokens=False))


@pytest.mark.parametrize("template", [None, MARKED])
def test_only_answers_and_their_ends_are_learnt(folder: Path, template: str | None) -> None:
    data = open_chat(folder, template=template)
    assert data.n_sequences == 2
    assert learnt(data, folder) == "it is 4<eos>yes, été<eos>"
    assert learnt(data, folder, 1) == "it is 4<eos>"


def test_the_vocabulary_is_counted_once(folder: Path) -> None:
    data = open_chat(folder)
    tokenizer = Mock(wraps=data._tokenizer)
    data.__dict__["_tokenizer"] = tokenizer
    sizes = [data.vocab_size for _ in range(3)]
    assert sizes == [1 + max(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values())] * 3
    assert tokenizer.get_vocab.call_count == 1


def test_targets_follow_their_inputs_and_the_rest_is_filled_up(folder: Path) -> None:
    data = open_chat(folder)
    inputs, targets = data.examples(np.array([1, 0]))
    assert inputs.shape == targets.shape == (2, 80)
    for row in range(2):
        (counts,) = np.nonzero(targets[row] != IGNORE)
        assert (targets[row, counts[:-1]] == inputs[row, counts[:-1] + 1]).all()
        assert (inputs[row, counts[-1] + 1 :] == 0).all()
    alone, _ = data.examples(np.array([0]))
    assert (alone[0] == inputs[1]).all()


def test_the_prompt_is_what_the_engine_would_ask_with(folder: Path) -> None:
    from raytide.actors.engine.text.tokenizer import Tokenizer as Served
    from raytide.actors.engine.types import Message

    inputs, targets = open_chat(folder).examples(np.array([1]))
    first = int(np.nonzero(targets[0] != IGNORE)[0][0])
    asked = Served(folder).chat_prompt([Message("user", "what is 2 + 2?")])
    assert inputs[0, : first + 1].tolist() == asked


def test_a_long_conversation_is_cut_at_its_end(folder: Path) -> None:
    whole, cut = open_chat(folder), open_chat(folder, seq_len=30)
    for long, short in zip(whole.examples(np.array([0])), cut.examples(np.array([0])), strict=True):
        assert (long[:, :30] == short).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 4 is not JSON"),
        ('{"prompt": "x"}', "line 4 has no messages"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 4 has no assistant message"),
        ('{"messages": [{"role": "assistant"}]}', "line 4: message 1 lacks a role or content"),
        ('{"messages": [{"role": "assistant", "content": "Hi \\ud83d"}]}', "line 4 has half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(folder: Path, line: str, message: str) -> None:
    (folder / "talks.jsonl").write_text(lines(TALK, TALK) + "\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        open_chat(folder)


def test_a_template_that_rewrites_turns_is_refused_with_the_line(folder: Path) -> None:
    (folder / "talks.jsonl").write_text(lines(TALK))
    with pytest.raises(DataError, match=r"line 1: the chat template renders turn 2 differently"):
        open_chat(folder, template=FORGETFUL)


def test_a_later_line_that_the_template_refuses_is_found_before_the_first_step(folder: Path) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    (folder / "talks.jsonl").write_text(lines(TALK, [{"role": "system", "content": "be brief"}, *TALK]))
    with pytest.raises(DataError, match=r"line 2: the model's chat template refused the messages: no system role"):
        open_chat(folder, template=strict)


CALL = {"id": "1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}}
CALLING = [
    {"role": "user", "content": "tide?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "low"},
    {"role": "assistant", "content": "it is low"},
]
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {}}}]
SHOWS_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tools_and_calls_are_shown_as_a_server_shows_them(folder: Path) -> None:
    from raytide.actors.engine.text.tokenizer import Tokenizer as Served
    from raytide.actors.engine.types import Message, ToolCallTurn

    (folder / "talks.jsonl").write_text(json.dumps({"messages": CALLING, "tools": TOOLS}) + "\n")
    data = open_chat(folder, seq_len=400, template=SHOWS_TOOLS)
    assert learnt(data, folder) == '{"name": "tide", "arguments": {"port": "Brest"}}<eos>it is low<eos>'
    (folder / "chat_template.jinja").write_text(SHOWS_TOOLS)
    calls = (ToolCallTurn("1", "tide", '{"port": "Brest"}'),)
    turns = [Message("user", "tide?"), Message("assistant", "", tool_calls=calls), Message("tool", "low")]
    asked = Served(folder).chat_prompt(turns, tools=TOOLS)
    assert data.examples(np.array([0]))[0][0, : len(asked)].tolist() == asked


def test_tools_may_be_a_text_and_a_template_may_show_calls_alone(folder: Path) -> None:
    (folder / "talks.jsonl").write_text(json.dumps({"messages": CALLING, "tools": json.dumps(TOOLS)}) + "\n")
    open_chat(folder, seq_len=400, template=SHOWS_TOOLS)
    (folder / "talks.jsonl").write_text(json.dumps({"messages": CALLING}) + "\n")
    open_chat(folder, seq_len=400, template=SHOWS_TOOLS.replace("{% if tools %}{{ tools | tojson }}{% endif %}", ""))


@pytest.mark.parametrize("line", [{"messages": TALK, "tools": TOOLS}, {"messages": CALLING}])
def test_tools_that_the_template_does_not_show_are_refused(folder: Path, line: dict[str, object]) -> None:
    (folder / "talks.jsonl").write_text(lines(TALK) + json.dumps(line) + "\n")
    with pytest.raises(DataError, match="line 2 has tools, which the chat template does not show"):
        open_chat(folder)


@pytest.mark.parametrize("template", [None, MARKED])
@pytest.mark.parametrize("mark", ["\ufdd0", "\ufdd1"])
def test_a_noncharacter_in_a_message_moves_no_answer(folder: Path, template: str | None, mark: str) -> None:
    said = [{**turn, "content": f"{turn['content'][:2]}{mark}{turn['content'][2:]}"} for turn in TALK]
    (folder / "talks.jsonl").write_text(lines(said))
    assert learnt(open_chat(folder, template=template), folder) == "it is 4<eos>yes, été<eos>"


def test_a_message_that_spells_out_a_special_token_is_text_as_in_serving(folder: Path) -> None:
    from raytide.actors.engine.text.tokenizer import Tokenizer as Served
    from raytide.actors.engine.types import Message

    talk = [{"role": "user", "content": "is <eos> an end?"}, {"role": "assistant", "content": "yes, <eos> is"}]
    (folder / "talks.jsonl").write_text(lines(talk))
    data = open_chat(folder)
    inputs, targets = data.examples(np.array([0]))
    asked = Served(folder).chat_prompt([Message("user", "is <eos> an end?")])
    assert inputs[0, : len(asked)].tolist() == asked
    assert learnt(data, folder) == "yes, <eos> is<eos>"
    assert int((targets == data.eos_id).sum()) == 1


def test_an_answer_may_have_a_special_token_that_the_template_does_not_write(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<step>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    talk = [{"role": "user", "content": "is <step> one?"}, {"role": "assistant", "content": "<step> <eos>"}]
    (folder / "talks.jsonl").write_text(lines(talk))
    data = open_chat(folder, template="{% if '<step>' in messages[0].content %}{% endif %}" + TEMPLATE)
    inputs, targets = data.examples(np.array([0]))
    assert int((inputs == tokenizer.token_to_id("<step>")).sum()) == 1
    assert learnt(data, folder) == "<step> <eos><eos>"
    assert int((targets == data.eos_id).sum()) == 1


def test_a_tokenizer_without_a_template_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no chat template"):
        open_chat(folder)


def test_the_default_one_of_several_named_templates_is_trained_on(folder: Path) -> None:
    expected = open_chat(folder).examples(np.array([0, 1]))
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": named}))
    for found, wanted in zip(open_chat(folder).examples(np.array([0, 1])), expected, strict=True):
        assert (found == wanted).all()


def test_the_digest_follows_the_conversations_and_the_template(folder: Path) -> None:
    before = open_chat(folder).digest
    assert open_chat(folder, template=MARKED).digest != before
    (folder / "talks.jsonl").write_text(lines(TALK[:2], TALK))
    assert open_chat(folder).digest != before


def test_the_engine_renders_marked_templates_without_their_marks(folder: Path) -> None:
    from raytide.actors.models.chat_template import ChatTemplate

    text = ChatTemplate(MARKED, {"eos_token": "<eos>"}).render(TALK, prompt=True)
    assert "\ufdd0" not in text and "\ufdd1" not in text
    assert text.endswith("yes, été<eos><assistant>")


words = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufdd0\ufdd1"), max_size=12)
turns = st.lists(st.tuples(st.sampled_from(("system", "user", "assistant")), words), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def talks_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the tokenizer that all examples of the property share."""
    folder = tmp_path_factory.mktemp("talks")
    save_tokenizer(folder)
    ends = "{% for m in messages %}{{ m.role }}<eos>{{ m.content }}<eos>{% endfor %}"
    (folder / "chat_template.jinja").write_text(ends + "{% if add_generation_prompt %}assistant<eos>{% endif %}")
    return folder


@settings(max_examples=25)
@given(talks=st.lists(turns.map(lambda found: [*found, ("assistant", "!")]), min_size=1, max_size=4))
def test_whatever_is_said_exactly_the_answers_are_learnt(talks: list[list[tuple[str, str]]], talks_dir: Path) -> None:
    with tempfile.NamedTemporaryFile("w", dir=talks_dir, suffix=".jsonl") as file:
        file.write(lines(*([{"role": role, "content": content} for role, content in talk] for talk in talks)))
        file.flush()
        data = ChatDataset(ChatSpec(file=file.name), talks_dir, 400)
        found = [learnt(data, talks_dir, index) for index in range(len(talks))]
    expected = ["".join(f"{content}<eos>" for role, content in talk if role == "assistant") for talk in talks]
    assert found == expected


def test_a_remote_file_is_fetched_once_for_each_version(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "local"))
    (tmp_path / "local").mkdir()
    fs = fsspec.filesystem("memory")
    for talks in (lines(TALK), lines(TALK), lines(TALK[:2], TALK)):
        fs.pipe_file(f"/{tmp_path.name}/talks.jsonl", talks.encode())
        data = ChatDataset(ChatSpec(file=f"memory://{tmp_path.name}/talks.jsonl"), folder, 80)
        assert data.n_sequences == talks.count("\n")
        assert learnt(data, folder, data.n_sequences - 1) == "it is 4<eos>yes, été<eos>"
    with pytest.raises(DataError, match="does not exist"):
        ChatDataset(ChatSpec(file="memory://nowhere/talks.jsonl"), folder, 80)
