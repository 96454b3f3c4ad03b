"""lm-evaluation-harness: log likelihoods by echo, and generation, over completions and chats."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import MODEL_DIR, URL, feature, run

FOLDER = Path(tempfile.mkdtemp())
ROWS = [{"question": f"{n} + {n}", "answer": str(2 * n), "wrong": str(2 * n + 1)} for n in range(6)]
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}} ="
"""
TASKS = {
    "choice": """task: choice
output_type: multiple_choice
doc_to_target: 0
doc_to_choice: "{{[answer, wrong]}}"
metric_list: [{metric: acc}]
""",
    "written": """task: written
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}


def evaluate(model, task, route, **options):
    (FOLDER / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (FOLDER / f"{task}.yaml").write_text(TASKS[task] + COMMON.format(data=FOLDER / "rows.jsonl"))
    arguments = {"model": "tiny", "base_url": f"{URL}/{route}", "num_concurrent": 4, "max_retries": 1} | options
    listed = ",".join(f"{key}={value}" for key, value in arguments.items())
    command = [
        str(Path(sys.executable).with_name("lm_eval")), "--model", model, "--model_args", listed, "--tasks", task,
        "--include_path", str(FOLDER), "--output_path", str(FOLDER / task),
    ]  # fmt: skip
    if model.endswith("chat-completions"):
        command.append("--apply_chat_template")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2500:]
    (result,) = sorted((FOLDER / task).rglob("results_*.json"))[-1:]
    return json.loads(result.read_text())["results"][task]


@feature
def log_likelihoods_by_echo():
    found = evaluate("local-completions", "choice", "completions", tokenizer=MODEL_DIR, tokenized_requests=True)
    assert 0 <= found["acc,none"] <= 1


@feature
def completions():
    assert "exact_match,none" in evaluate("local-completions", "written", "completions", tokenizer=MODEL_DIR)


@feature
def chats():
    assert "exact_match,none" in evaluate("local-chat-completions", "written", "chat/completions")


run()
