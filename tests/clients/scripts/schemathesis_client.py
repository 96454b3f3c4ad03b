"""schemathesis: requests made from /openapi.json, with all checks, and with models, files and batches that exist."""

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import requests
from features import URL, feature, run

ROOT = URL.removesuffix("/v1")
ROW = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "agent", "prompt": "x"}}


def existing_ids():
    """Returns the id of a new file and that of a batch of it."""
    upload = {"file": ("rows.jsonl", io.BytesIO(json.dumps(ROW).encode()))}
    file = requests.post(f"{URL}/files", files=upload, data={"purpose": "batch"}, timeout=60).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return file, requests.post(f"{URL}/batches", json=asked, timeout=60).json()["id"]


def narrowed(schema):
    """Returns a schema of which requests name a model, a file and a batch that exist."""
    file, batch = existing_ids()
    known = {"model": "agent", "file_id": file, "input_file_id": file, "batch_id": batch}
    for name, component in schema["components"]["schemas"].items():
        if name.endswith("Request"):
            for field in known.keys() & component["properties"].keys():
                component["properties"][field] = {"type": "string", "enum": [known[field]]}
    for operations in schema["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    parameter["schema"] = {"type": "string", "enum": [known[parameter["name"]]]}
    return schema


def check(schema, *options):
    command = [
        str(Path(sys.executable).with_name("st")), "run", schema, "--url", ROOT, "--seed", "16",
        "--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--continue-on-failure", "--no-color",
        *options,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder)
    assert done.returncode == 0, done.stdout[-30000:]
    assert "Tested: 17" in done.stdout, done.stdout[-30000:]


@feature
def every_operation_of_the_schema():
    check(f"{ROOT}/openapi.json", "--max-examples", "40")


@feature
def every_operation_with_what_exists():
    schema = narrowed(requests.get(f"{ROOT}/openapi.json", timeout=60).json())
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(schema, file)
        file.flush()
        # What a model, a file or a batch cannot do is refused too, of which schemas say nothing.
        check(file.name, "--max-examples", "40", "--exclude-checks", "positive_data_acceptance")


run()
