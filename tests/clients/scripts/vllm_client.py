"""`vllm bench serve` over chats, completions and embeddings."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from features import MODEL_DIR, URL, feature, run

FOLDER = Path(tempfile.mkdtemp())
GOODPUT = ("--goodput", "ttft:5000")


def benchmark(backend, route, *options):
    """Runs vLLM's own command. Its package for CPUs lacks the metadata that it asks for under its usual name."""
    metadata = FOLDER / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    command = [
        str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", backend, "--model", "tiny",
        "--base-url", URL.removesuffix("/v1"), "--endpoint", f"/v1/{route}", "--tokenizer", MODEL_DIR,
        "--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "8",
        "--save-result", "--result-dir", str(FOLDER), "--result-filename", f"{backend}.json",
        *options,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(FOLDER), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2500:]
    result = json.loads((FOLDER / f"{backend}.json").read_text())
    assert result["completed"] == 8, result
    return result


@feature
def chats():
    result = benchmark("openai-chat", "chat/completions", "--ignore-eos", *GOODPUT)
    assert result["total_output_tokens"] == 64
    assert result["request_goodput"] > 0


@feature
def completions():
    result = benchmark("openai", "completions", "--ignore-eos", *GOODPUT)
    assert result["total_output_tokens"] == 64
    assert result["request_goodput"] > 0


@feature
def embeddings():
    assert benchmark("openai-embeddings", "embeddings")["total_input_tokens"] >= 8 * 16


run()
