"""curl: plain requests, server-sent events, uploads, and a body for which it asks before it sends it."""

import json
import subprocess
import tempfile
from pathlib import Path

from features import KEYS, URL, feature, run

FOLDER = Path(tempfile.mkdtemp())
HELLO = [{"role": "user", "content": "the tide comes in"}]
JSON = ("-H", "content-type: application/json")


def curl(path, *options):
    """Returns the status, the headers and the body of the last response."""
    command = ["curl", "--silent", "--show-error", "--include", "--max-time", "60", *options, f"{URL}{path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    rest = done.stdout
    while rest.startswith("HTTP/"):
        head, _, rest = rest.partition("\n\n")
        status, *lines = head.splitlines()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(status.split()[1]), headers, rest


def chat(**fields):
    return json.dumps({"model": "talker", "messages": HELLO, "max_tokens": 8, **fields})


@feature
def plain():
    status, headers, body = curl("/chat/completions", *JSON, "-d", chat())
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["choices"][0]["message"]["content"] == "tide tid"
    assert json.loads(curl("/models")[2])["data"]
    assert curl("/models", "--head")[0] in (200, 405)


@feature
def events():
    options = {"include_usage": True}
    for path, field, body in (
        ("/chat/completions", "delta", chat(stream=True, stream_options=options)),
        ("/completions", "text", json.dumps({"model": "talker", "prompt": "x", "max_tokens": 8, "stream": True})),
    ):
        status, headers, text = curl(path, *JSON, "--no-buffer", "-d", body)
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        assert headers["cache-control"] == "no-cache"
        assert "content-length" not in headers
        blocks = text.strip().split("\n\n")
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        assert blocks[-1] == "data: [DONE]"
        assert text.endswith("\n\n")
        pieces = [json.loads(block[6:])["choices"] for block in blocks[:-1]]
        found = [each[0].get("text") or each[0].get("delta", {}).get("content") or "" for each in pieces if each]
        assert "".join(found) == "tide tid", (field, found)


@feature
def events_of_responses():
    body = json.dumps({"model": "talker", "input": "x", "max_output_tokens": 8, "stream": True})
    status, _, text = curl("/responses", *JSON, "--no-buffer", "-d", body)
    assert status == 200
    numbers = []
    for block in text.strip().split("\n\n"):
        event, data = block.split("\n")
        found = json.loads(data.removeprefix("data: "))
        assert event == f"event: {found['type']}"
        numbers.append(found["sequence_number"])
    assert numbers == list(range(len(numbers)))


@feature
def a_stream_that_fails_before_it_begins():
    status, headers, body = curl("/chat/completions", *JSON, "-d", chat(stream=True, model="none"))
    assert (status, headers["content-type"]) == (404, "application/json")
    assert json.loads(body)["error"]["code"] == "model_not_found"


@feature
def a_large_body():
    """curl asks by `Expect: 100-continue`, and waits a second where a server says nothing."""
    path = FOLDER / "large.json"
    path.write_text(chat(messages=[{"role": "user", "content": "x " * 1_000_000}]))
    status, _, body = curl("/chat/completions", *JSON, "-d", f"@{path}", "-H", "Expect: 100-continue")
    assert status == 400
    assert json.loads(body)["error"]["code"] == "context_length_exceeded"


@feature
def a_body_in_chunks():
    status, _, body = curl("/chat/completions", *JSON, "-H", "Transfer-Encoding: chunked", "-d", chat())
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 8


@feature
def files():
    path = FOLDER / "rows.jsonl"
    row = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "talker", "prompt": "x"}}
    path.write_text(json.dumps(row))
    status, _, body = curl("/files", "-F", "purpose=batch", "-F", f"file=@{path}")
    assert status == 200
    file = json.loads(body)
    assert (file["filename"], file["bytes"]) == ("rows.jsonl", path.stat().st_size)
    assert json.loads(curl(f"/files/{file['id']}/content")[2]) == row
    assert json.loads(curl(f"/files/{file['id']}", "-X", "DELETE")[2])["deleted"]


@feature
def keys():
    def ask(key):
        return curl("/chat/completions", *JSON, "-H", f"Authorization: Bearer {key}", "-d", chat())

    assert ask(KEYS["scoped"])[0] == 200
    status, headers, body = ask("rk-" + "x" * 43)
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert json.loads(body)["error"]["code"] == "invalid_api_key"


@feature
def malformed():
    for body in ("{", "", "[]", '"x"', '{"model": 1}'):
        status, headers, text = curl("/chat/completions", *JSON, "--data-binary", body)
        assert (status, headers["content-type"]) == (400, "application/json")
        assert json.loads(text)["error"]["type"] == "invalid_request_error"


run()
