"""schemathesis: requests made from /openapi.json, with all checks, and with models, files, batches and responses that
exist.
"""

import io
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import requests
from features import URL, feature, run

LEAST_CASES, LEAST_WITH_BODY = 10, 50
"""The least cases of an operation, and of one with a body."""
LEAST_OPERATIONS, LEAST_IN_ALL = 25, 3000
"""A run of few operations or cases would prove nothing."""
ROOT = URL.removesuffix("/v1")
ROW = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "agent", "prompt": "x"}}

CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 429]
"""
"""A list of too many messages is too large a body before it is parsed: 413 is not among the defaults."""


def existing_ids():
    """Returns the ids of a new file, of a batch of it, and of a response."""
    upload = {"file": ("rows.jsonl", io.BytesIO(json.dumps(ROW).encode()))}
    file = requests.post(f"{URL}/files", files=upload, data={"purpose": "batch"}, timeout=60).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = requests.post(f"{URL}/batches", json=asked, timeout=60).json()["id"]
    asked = {"model": "agent", "input": "hello", "max_output_tokens": 8}
    return file, batch, requests.post(f"{URL}/responses", json=asked, timeout=60).json()["id"]


def narrowed(**known):
    """Returns the schema with these values alone for fields of requests and for parts of paths."""
    schema = requests.get(f"{ROOT}/openapi.json", timeout=60).json()
    for name, component in schema["components"]["schemas"].items():
        if name.endswith("Request"):
            for field in known.keys() & component["properties"].keys():
                may_be_null = field == "previous_response_id"
                component["properties"][field] = {"enum": [known[field], None] if may_be_null else [known[field]]}
            if "model" in component["properties"]:  # optional where there is one model alone
                component["required"] = sorted({*component.get("required", ()), "model"})
            component["properties"].pop("timeout", None)  # one of a microsecond is a 504, as it should be
    for operations in schema["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in known:
                    parameter["schema"] = {"type": "string", "enum": [known[parameter["name"]]]}
    return schema


def checked_cases(events):
    """Returns how many cases of each operation were sent, answered and checked, by its method and path."""
    checked = Counter()
    for line in events.read_text().splitlines():
        found = json.loads(line).get("ScenarioFinished")
        if found is not None:
            checks, answers = found["recorder"].get("checks", {}), found["recorder"].get("interactions", {})
            checked[found["recorder"]["label"]] += sum(bool(checks[case]) and case in answers for case in checks)
    return checked


def check(schema, *options):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "openapi.json").write_text(json.dumps(schema))
        (Path(folder) / "schemathesis.toml").write_text(CONFIG)
        command = [
            str(Path(sys.executable).with_name("st")), "run", "openapi.json", "--url", ROOT, "--seed", "16",
            "--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--request-timeout", "60",
            "--continue-on-failure", "--no-color", "--report-ndjson-path", "events.ndjson", *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder)
        checked = checked_cases(Path(folder) / "events.ndjson")
    assert done.returncode == 0, done.stdout[-30000:]
    wanted = {
        f"{method.upper()} {path}": LEAST_WITH_BODY if "requestBody" in operation else LEAST_CASES
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    }
    few = {name: (checked[name], least) for name, least in wanted.items() if checked[name] < least}
    assert not few, f"operations with too few cases: {few}"
    assert len(wanted) >= LEAST_OPERATIONS
    assert checked.total() >= LEAST_IN_ALL, checked
    sys.stdout.write(f"{checked.total()} cases of {len(wanted)} operations, at least {min(checked.values())} of each\n")


@feature
def every_operation_of_the_schema():
    check(narrowed(model="none"))


@feature
def every_operation_with_what_exists():
    """Some requests are refused because of what the model or the batch is, of which schemas say nothing."""
    file, batch, response = existing_ids()
    schema = narrowed(
        model="agent",
        file_id=file,
        input_file_id=file,
        batch_id=batch,
        response_id=response,
        previous_response_id=response,
    )
    check(schema, "--exclude-checks", "positive_data_acceptance")


run()
