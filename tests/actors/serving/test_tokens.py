"""`/tokenize` and `/detokenize`, of a model with a BOS and a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.actors.engine.tiny import save_llama
from tests.actors.serving.conftest import serving
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from raytide.actors.engine import EngineConfig, NativeEngine

CHAT: Any = [{"role": "user", "content": "the tide"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if loud %}!{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    folder = tmp_path_factory.mktemp("tiny")
    save_llama(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = "<eos>"
    tokenizer.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with serving(NativeEngine(EngineConfig(model_dir=str(folder), block_size=16)), "m") as url:
        yield lambda path, **body: httpx.post(f"{url}/{path}", json=body, timeout=60)


def test_a_text_and_its_tokens(ask: Ask) -> None:
    found = ask("tokenize", model="m", prompt="the tide", return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 256
    assert found["token_strs"][0] == "<eos>"
    plain = ask("tokenize", prompt="the tide", add_special_tokens=False).json()
    assert plain["tokens"] == found["tokens"][1:]
    assert plain["token_strs"] is None
    assert ask("detokenize", model="m", tokens=found["tokens"]).json() == {"prompt": "<eos>the tide"}
    assert ask("tokenize", prompt="").json()["tokens"] == found["tokens"][:1]


def test_a_chat_has_the_tokens_of_its_prompt(ask: Ask) -> None:
    def text(messages: Any = CHAT, **fields: Any) -> str:
        tokens = ask("tokenize", model="m", messages=messages, **fields).json()["tokens"]
        return str(ask("detokenize", tokens=tokens).json()["prompt"])

    assert text() == "user: the tide\nassistant: "
    assert text(add_generation_prompt=False) == "user: the tide\n"
    begun = [*CHAT, {"role": "assistant", "content": "comes"}]
    assert text(begun, continue_final_message=True) == "user: the tide\nassistant: comes"
    assert text(chat_template_kwargs={"loud": True}) == "user: the tide\n!assistant: "
    counted = ask("v1/chat/completions", model="m", messages=CHAT, max_tokens=1).json()["usage"]["prompt_tokens"]
    assert counted == ask("tokenize", messages=CHAT).json()["count"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": CHAT}, "prompt"),
        ({"prompt": "x", "tools": []}, "tools"),
        ({"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "x", "colour": "blue"}, "colour"),
        ({"prompt": "x " * 5000}, "prompt"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(ask: Ask, body: dict[str, Any], param: str) -> None:
    answer = ask("tokenize", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert ask("tokenize", model="other", prompt="x").status_code == 404
    assert ask("detokenize", tokens=[-1]).status_code == 400
