"""A real model behind the app: what the HTTP front adds must not change what the engine says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from tokenizers import Tokenizer

from raytide.actors.engine.text.structured_output import can_structure
from raytide.actors.serving.engines import build_engine
from raytide.core.errors import ConfigError
from raytide.core.objects.endpoint import ServeSpec

structuring = pytest.mark.skipif(
    not can_structure(), reason="llguidance: an environment from before it was a dependency"
)

HELLO = [{"role": "user", "content": "the tide comes in"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with a byte-level vocabulary, as Hugging Face would lay it out."""
    import torch
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the tide comes in"], trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    tokenizer.save(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def client(serve: Callable[..., str], client_of: Callable[[str], OpenAI], model_dir: Path) -> OpenAI:
    options: dict[str, object] = {"num_blocks": 64, "max_running": 8, "device": "cpu"}
    spec = ServeSpec(name="tiny", model=str(model_dir), engine=options)
    return client_of(serve(build_engine(spec), "tiny"))


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    ask = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"


def test_a_seed_repeats_an_answer_and_gives_each_choice_its_own(client: OpenAI) -> None:
    def ask(seed: int) -> list[str]:
        answer = client.completions.create(model="tiny", prompt="the tide", max_tokens=12, n=2, seed=seed)
        return [choice.text for choice in answer.choices]

    assert ask(7) == ask(7)
    assert ask(7)[0] != ask(7)[1]
    assert ask(7) != ask(99)


def test_many_requests_at_once_get_their_own_answers(client: OpenAI) -> None:
    prompts = [f"the tide {number}" for number in range(12)]
    one_by_one = [client.completions.create(model="tiny", prompt=p, max_tokens=6, temperature=0) for p in prompts]
    together = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0)
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in one_by_one]


def test_unknown_engines_and_options_are_refused_by_name() -> None:
    for options, word in (
        ({"kind": "steam"}, "steam"),
        ({"num_blokcs": 1}, "num_blokcs"),
        ({"kind": "fake", "x": 1}, "x"),
    ):
        with pytest.raises(ConfigError, match=word):
            build_engine(ServeSpec(name="m", model="/nowhere", engine=options))


@structuring
def test_a_response_format_is_kept(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sea": {"enum": ["calm", "rough"]}, "metres": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["sea", "metres"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,  # type: ignore[arg-type]
        max_tokens=100,
        n=3,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "sea", "schema": schema, "strict": True}},
        extra_body={"top_k": 50},
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), schema)


@structuring
@pytest.mark.parametrize(
    "extra",
    [
        {"guided_choice": ["ebb", "flood"]},
        {"guided_regex": "ebb|flood"},
        {"guided_json": {"enum": ["ebb", "flood"]}},
        {"structured_outputs": {"grammar": 'root ::= "ebb" | "flood"'}},
        {"structured_outputs": {"choice": ["ebb", "flood"]}},
    ],
)
def test_vllms_fields_for_structured_output_are_known(client: OpenAI, extra: dict[str, object]) -> None:
    answer = client.completions.create(model="tiny", prompt="the tide", max_tokens=20, extra_body=extra)
    assert answer.choices[0].text.strip('"') in ("ebb", "flood")
    assert answer.choices[0].finish_reason == "stop"


@structuring
def test_a_schema_that_cannot_be_used_is_a_400_and_harms_nobody(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="json_schema"):
        client.completions.create(model="tiny", prompt="the", extra_body={"guided_json": {"type": "nope"}})
    assert client.completions.create(model="tiny", prompt="the", max_tokens=2).usage


def test_sampling_options_reach_the_engine(client: OpenAI, model_dir: Path) -> None:
    a, b = (Tokenizer.from_file(str(model_dir / "tokenizer.json")).token_to_id(letter) for letter in "ab")

    def ask(**extra: object) -> str:
        body = {"ignore_eos": True, "logit_bias": {a: 100.0, b: 90.0}, **extra}
        answer = client.completions.create(
            model="tiny", prompt="the tide", max_tokens=6, temperature=0, extra_body=body
        )
        return answer.choices[0].text

    assert ask() == "aaaaaa"
    assert ask(bad_words=["a"]) == "bbbbbb"
    assert ask(stop=["aaa"]) == ""
    assert ask(stop=["aaa"], include_stop_str_in_output=True) == "aaa"
    assert ask(stop_token_ids=[a], min_tokens=3) == "bbb"
    assert ask(best_of=3) == "aaaaaa"


def test_an_echo_with_logprobs_scores_the_prompt(client: OpenAI) -> None:
    answer = client.completions.with_raw_response.create(
        model="tiny", prompt="the tide", max_tokens=2, echo=True, logprobs=2, temperature=0
    )
    (choice,) = json.loads(answer.text)["choices"]
    scored = choice["logprobs"]
    assert choice["text"].startswith("the tide")
    assert "".join(scored["tokens"]) == choice["text"]
    assert (scored["token_logprobs"][0], scored["top_logprobs"][0]) == (None, None)
    assert all(value < 0 for value in scored["token_logprobs"][1:])
    for at, token in zip(scored["text_offset"], scored["tokens"], strict=True):
        assert choice["text"][at:].startswith(token)
