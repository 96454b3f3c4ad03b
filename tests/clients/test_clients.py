"""Other people's clients, unmodified, against a gateway: each in a virtual environment of its own, made by pip.

CLIENT_VENVS names a folder in which the environments are kept from one run to the next.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_llama

pytestmark = [pytest.mark.soak, pytest.mark.client, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
PACKAGES: dict[str, tuple[str, ...]] = {
    "openai2": ("openai==2.54.0",),
    "litellm": ("litellm==1.106.2", "mcp==2.3.0"),  # it imports mcp for any request with tools
    "langchain": ("langchain-openai==1.7.3",),
    "instructor": ("instructor==1.17.0",),
    "lm_eval": ("lm_eval[api]==0.4.13", "transformers==5.23.0"),
    "guidellm": ("guidellm==0.8.1",),
    "locust": ("locust==2.47.0",),
    "agents": ("openai-agents==0.24.0",),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0",),
    "llama_index": ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
    "schemathesis": ("schemathesis==4.32.5",),
}
"""The clients that this project does not install. openai 3.x, anthropic and vLLM are those of its own environment."""
SCRIPTS = {"openai2": "openai"}
NODE_PACKAGES = (
    "openai@6.49.0",
    "ai@6.0.326",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.91",
    "zod@4.6.7",
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, with a tokenizer that transformers can load too."""
    folder = tmp_path_factory.mktemp("tiny")
    save_llama(folder, max_position_embeddings=2048)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 2048}))
    return folder


@pytest.fixture(scope="module")
def url(model_dir: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.clients.gateway", str(model_dir)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1])
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        os.environ["CLIENT_KEYS"] = process.stdout.readline().strip()
        yield address
        assert process.poll() is None, "the gateway has ended"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def venvs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("CLIENT_VENVS")
    return Path(kept) if kept else tmp_path_factory.mktemp("venvs")


def python_of(client: str, venvs: Path) -> str:
    """Returns the interpreter of the client's environment, which is made where it does not exist."""
    folder, packages = venvs / client, PACKAGES[client]
    made = folder / "made.txt"
    if not made.exists() or made.read_text() != " ".join(packages):
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(pip, check=True, timeout=900)
        made.write_text(" ".join(packages))
    return str(folder / "bin/python")


def features(python: str, client: str, url: str, model_dir: Path) -> None:
    script = HERE / "scripts" / f"{SCRIPTS.get(client, client)}_client.py"
    check(python, str(script), url, str(model_dir))


def check(*command: str) -> None:
    """Runs a client's script, shows what it prints and fails if one of its features does."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "ok " in done.stdout


@pytest.mark.parametrize("client", PACKAGES)
def test_a_client_in_an_environment_of_its_own(client: str, venvs: Path, url: str, model_dir: Path) -> None:
    features(python_of(client, venvs), client, url, model_dir)


@pytest.mark.parametrize("client", ["openai", "anthropic", "vllm", "curl"])
def test_a_client_of_this_environment(client: str, url: str, model_dir: Path) -> None:
    if client == "curl" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    if client == "vllm":
        pytest.importorskip("vllm", reason="./dev setup --vllm installs it")
    features(sys.executable, client, url, model_dir)


@pytest.fixture(scope="module")
def node_scripts(venvs: Path) -> Path:
    """Returns the folder of the scripts for Node, with their packages installed there."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = venvs / "node"
    shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)
    npm = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *NODE_PACKAGES]
    subprocess.run(npm, check=True, timeout=900)
    return folder


@pytest.mark.parametrize("client", ["openai", "ai_sdk"])
def test_a_client_of_node(client: str, node_scripts: Path, url: str) -> None:
    check("node", str(node_scripts / f"{client}_client.mjs"), url)
