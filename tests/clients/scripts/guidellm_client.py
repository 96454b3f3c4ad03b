"""guidellm: a benchmark of chats with synthetic prompts."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import MODEL_DIR, URL, feature, run


def benchmark(*profile, request_format):
    out = Path(tempfile.mkdtemp()) / "report.json"
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={URL.removesuffix('/v1')},model=tiny,request_format={request_format}",
        "--tokenizer", f"kind=huggingface_auto,model={MODEL_DIR}",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--constraint", "kind=max_requests,count=8",
        "--output", f"kind=json,path={out}",
        *profile,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    (found,) = json.loads(out.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0), totals


@feature
def chats_one_after_the_other():
    benchmark("--profile", "kind=synchronous", request_format="/v1/chat/completions")


@feature
def chats_side_by_side():
    benchmark("--profile", "kind=concurrent,streams=4", request_format="/v1/chat/completions")


@feature
def completions():
    benchmark("--profile", "kind=synchronous", request_format="/v1/completions")


run()
