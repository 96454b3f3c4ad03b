"""locust: users that stream chats."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import URL, feature, run

USERS = """
from locust import FastHttpUser, HttpUser, task

BODY = {"model": "talker", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True}


class Plain(HttpUser):
    @task
    def chat(self):
        with self.client.post("/v1/chat/completions", json=BODY, stream=True, catch_response=True) as answer:
            last = [line for line in answer.iter_lines() if line][-1]
            answer.success() if last == b"data: [DONE]" else answer.failure(repr(last))


class Fast(FastHttpUser):
    @task
    def models(self):
        self.client.get("/v1/models")
"""


@feature
def streamed_chats_and_lists_of_models():
    folder = Path(tempfile.mkdtemp())
    (folder / "locustfile.py").write_text(USERS)
    command = [
        str(Path(sys.executable).with_name("locust")), "-f", str(folder / "locustfile.py"), "--headless",
        "-u", "8", "-r", "8", "-t", "5s", "--host", URL.removesuffix("/v1"), "--json", "--stop-timeout", "10",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for entry in json.loads(done.stdout[done.stdout.index("[") :]):
        assert entry["num_requests"] > 5
        assert entry["num_failures"] == 0, entry


run()
