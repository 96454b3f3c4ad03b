"""Fields that vLLM's server has beyond OpenAI's, with the shapes of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.actors.engine.tiny import save_llama
from tests.actors.serving.conftest import serving

from raytide.actors.engine import EngineConfig, NativeEngine
from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.types import ChatFormat, EngineInfo

HELLO: Any = [{"role": "user", "content": "the tide"}]
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    folder = tmp_path_factory.mktemp("tiny")
    save_llama(folder)
    with serving(NativeEngine(EngineConfig(model_dir=str(folder), block_size=16)), "m") as url:
        greedy = {"model": "m", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        yield lambda path, **body: httpx.post(f"{url}/v1/{path}", json={**greedy, **body}, timeout=60)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    *data, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(each) for each in data]


def test_token_ids_of_a_completion_whole_and_streamed(ask: Ask) -> None:
    prompt = ask("completions", prompt="the tide", max_tokens=1, return_token_ids=True).json()["choices"][0][
        "prompt_token_ids"
    ]
    (whole,) = ask("completions", prompt=prompt, return_token_ids=True).json()["choices"]
    assert (whole["prompt_token_ids"], len(whole["token_ids"])) == (prompt, 6)
    pieces = [
        each["choices"][0] for each in events(ask("completions", prompt=prompt, return_token_ids=True, stream=True))
    ]
    assert [token for each in pieces for token in each["token_ids"]] == whole["token_ids"]
    assert [each.get("prompt_token_ids") for each in pieces] == [prompt] + [None] * (len(pieces) - 1)
    assert "token_ids" not in ask("completions", prompt=prompt).json()["choices"][0]


def test_token_ids_of_a_chat_whole_and_streamed(ask: Ask) -> None:
    whole = ask("chat/completions", messages=HELLO, return_token_ids=True).json()
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    pieces = events(ask("chat/completions", messages=HELLO, return_token_ids=True, stream=True))
    assert pieces[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    tokens = [token for each in pieces for token in each["choices"][0].get("token_ids") or []]
    assert tokens == whole["choices"][0]["token_ids"]


def test_log_probabilities_of_prompts(ask: Ask) -> None:
    echoed = ask("completions", prompt=[5, 6, 7], echo=True, logprobs=2).json()["choices"][0]["logprobs"]
    (choice,) = ask("completions", prompt=[5, 6, 7], prompt_logprobs=2).json()["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None
    for token, scored, expected in zip([6, 7], rest, echoed["token_logprobs"][1:3], strict=True):
        assert scored[str(token)]["logprob"] == pytest.approx(expected, abs=1e-4)
        assert len(scored) == 3 and {each["rank"] for each in scored.values()} >= {1, 2}
    chat = ask("chat/completions", messages=HELLO, prompt_logprobs=0).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    for wrong in ({"stream": True}, {"n": 2}, {"echo": True, "logprobs": 1}):
        refused = ask("completions", prompt="x", prompt_logprobs=1, **wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_tokens_may_be_named_by_their_ids(ask: Ask) -> None:
    (choice,) = ask(
        "completions", prompt="x", logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True
    ).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    chat = ask("chat/completions", messages=HELLO, logprobs=True, return_tokens_as_token_ids=True).json()
    assert chat["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")


def test_what_stopped_an_answer(ask: Ask) -> None:
    whole = ask("completions", prompt="x", return_token_ids=True).json()["choices"][0]
    assert "stop_reason" not in whole
    token = whole["token_ids"][3]
    by_token = ask("completions", prompt="x", stop_token_ids=[token]).json()["choices"][0]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", token)
    stop = whole["text"][2:4]
    streamed = events(ask("completions", prompt="x", stop=["never!", stop], stream=True))[-1]["choices"][0]
    assert (streamed["finish_reason"], streamed["stop_reason"]) == ("stop", stop)
    chat = ask("chat/completions", messages=HELLO, stop_token_ids=list(range(256))).json()["choices"][0]
    assert isinstance(chat["stop_reason"], int)


def test_each_piece_of_a_stream_may_have_the_usage_so_far(ask: Ask) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in (("completions", {"prompt": "the tide"}), ("chat/completions", {"messages": HELLO})):
        pieces = events(ask(path, stream=True, stream_options=options, **body))
        counts = [each["usage"]["completion_tokens"] for each in pieces]
        assert counts == sorted(counts) and counts[-1] == 6
        assert len({each["usage"]["prompt_tokens"] for each in pieces}) == 1


def test_reasoning_may_be_left_out() -> None:
    class Thinker(FakeEngine):
        async def start(self) -> EngineInfo:
            info = await super().start()
            fields = {name: getattr(info, name) for name in EngineInfo.__slots__}
            return EngineInfo(**{**fields, "chat": ChatFormat(reasoning="open")})

    reply = "I weigh it.</think>Yes."
    body = {"model": "m", "messages": HELLO, "max_tokens": len(reply), "include_reasoning": False}
    with serving(Thinker(reply=reply), "m") as url:
        whole = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]
        pieces = events(httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60))
    assert whole == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert not any("reasoning_content" in each["choices"][0]["delta"] for each in pieces)
