"""vLLM behind the app, for real: an answer over HTTP, and what a client and the health check see when its process is
killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest
from openai import APIStatusError, OpenAI
from tests.actors.engine.tiny import save_llama
from tests.actors.serving.conftest import serving

from raytide.actors.serving.engines import build_engine
from raytide.core.errors import ConfigError
from raytide.core.objects.endpoint import ServeSpec

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: ./dev setup --vllm")


def cores() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if "EngineCore" in process.name()]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The app's address and vLLM's process."""
    save_llama(tmp_path, hidden_size=128, head_dim=32)
    options: dict[str, object] = {"kind": "vllm", "kv_memory_gb": 0.05, "max_running": 4}
    spec = ServeSpec(name="tiny", model=str(tmp_path), engine=options)
    before = cores()
    with ExitStack() as stack:
        url = stack.enter_context(serving(build_engine(spec), "tiny"))
        [core] = [process for process in cores() if process not in before]
        yield url, core
    assert psutil.wait_procs([process for process in cores() if process not in before], timeout=60.0)[1] == []


@needs_vllm
def test_it_answers_until_its_process_dies_and_says_so_then(
    served: tuple[str, psutil.Process], client_of: Callable[[str], OpenAI]
) -> None:
    url, core = served
    client = client_of(url)
    hello = [{"role": "user", "content": "the tide"}]
    ask = {"model": "tiny", "messages": hello, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    assert whole.usage.completion_tokens == 12
    stream = client.chat.completions.create(**ask, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    core.kill()
    psutil.wait_procs([core])
    with pytest.raises(APIStatusError, match="died"):
        client.chat.completions.create(**ask)  # type: ignore[call-overload]
    health = httpx.get(f"{url}/health", timeout=60)
    assert health.status_code == 503, "a dead engine is no error of the request"
    assert "died" in health.text


def test_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_blokcs"):
        build_engine(ServeSpec(name="m", model="/nowhere", engine={"kind": "vllm", "num_blokcs": 1}))
