import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.actors.engine.tiny import EOS, save_llama

from raytide.actors.engine import LLM, Message, SamplingParams
from raytide.core.errors import ConfigError, DataError, UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    save_llama(tmp_path)
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    body = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(body | changes))


def test_an_unsupported_architecture_is_refused_with_the_list(copy: Path) -> None:
    edit(copy / "config.json", architectures=["MambaForCausalLM"])
    with pytest.raises(
        ConfigError, match=r"MambaForCausalLM is not supported.*Supported: GPT2LMHeadModel, .*, Qwen3MoeForCausalLM"
    ):
        LLM(copy)


def test_an_unknown_rope_scaling_is_refused(copy: Path) -> None:
    edit(copy / "config.json", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ConfigError, match=r"rope scaling dynamic.*Supported: default, linear"):
        LLM(copy)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        LLM(tmp_path / "nowhere")


def test_a_missing_weight_is_named(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(DataError, match=r"layers\.1\.mlp\.up_proj"):
        LLM(copy)


def test_a_weight_of_another_shape_is_named(copy: Path) -> None:
    edit(copy / "config.json", intermediate_size=128)
    with pytest.raises(DataError, match=r"gate_proj.*shape \(160, 64\).*implies \(128, 64\)"):
        LLM(copy)


def test_a_torn_file_is_named(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"model\.safetensors"):
        LLM(copy)


def test_a_file_that_is_overwritten_leaves_loaded_weights_as_they_were(copy: Path) -> None:
    llm, path = LLM(copy), copy / "model.safetensors"
    before, body = llm.logits([9, 8, 7]), path.read_bytes()
    start = 8 + int.from_bytes(body[:8], "little")
    with path.open("r+b") as file:  # as cp and save_pretrained write; both also make it shorter for a moment
        file.seek(start)
        file.write(bytes(len(body) - start))
    assert torch.equal(llm.logits([9, 8, 7]), before)


def test_an_unknown_engine_option_says_what_was_meant(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean max_running"):
        LLM(model_dir, max_runing=3)


def test_end_tokens_come_from_config_generation_config_and_tokenizer_config(copy: Path) -> None:
    free = LLM(copy).generate([[9, 8, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].outputs[0]
    end = free.token_ids[2]
    expected = free.token_ids[: free.token_ids.index(end) + 1]
    edit(copy / "generation_config.json", eos_token_id=[EOS, end])
    ended = LLM(copy).generate([[9, 8, 7]], GREEDY)[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason) == (expected, "stop")
    (copy / "generation_config.json").unlink()
    edit(copy / "config.json", eos_token_id=end)
    assert LLM(copy).generate([[9, 8, 7]], GREEDY)[0].outputs[0].token_ids == expected


def test_chat_uses_the_models_template(copy: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"
    edit(copy / "tokenizer_config.json", chat_template=template, eos_token={"content": "<eos>"})
    llm = LLM(copy)
    answer = llm.chat([{"role": "user", "content": "hi"}, Message("assistant", "yes")], GREEDY)
    same = llm.generate("<user>hi<eos><assistant>yes<eos><assistant>", GREEDY)[0]
    assert answer.prompt_token_ids == same.prompt_token_ids
    assert EOS in answer.prompt_token_ids
    assert answer.outputs[0].token_ids == same.outputs[0].token_ids


def test_a_template_that_refuses_is_a_usage_error(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(UsageError, match="no system role"):
        LLM(copy).chat([Message("system", "x")])


def test_without_a_template_turns_are_lines(model_dir: Path) -> None:
    llm = LLM(model_dir)
    answer = llm.chat([Message("user", "hi")], GREEDY)
    assert answer.prompt_token_ids == llm.generate("user: hi\nassistant:", GREEDY)[0].prompt_token_ids


def test_texts_and_token_ids_answer_in_order_with_their_own_parameters(model_dir: Path) -> None:
    llm = LLM(model_dir, max_running=2)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 4)]
    answers = llm.generate(["import", "def f(", "class"], params)
    assert [answer.prompt for answer in answers] == ["import", "def f(", "class"]
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [9, 1, 4]
    assert [answer.usage.completion_tokens for answer in answers] == [9, 1, 4]
    by_ids = llm.generate([answer.prompt_token_ids for answer in answers], params)
    assert [answer.outputs[0].text for answer in by_ids] == [answer.outputs[0].text for answer in answers]
    assert by_ids[0].prompt is None
    with pytest.raises(UsageError, match="3 prompts but 2"):
        llm.generate(["a", "b", "c"], params[:2])
