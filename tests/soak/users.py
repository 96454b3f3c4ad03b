"""Those who use the cluster while the storm blows: drivers that hold gangs, and clients of an endpoint."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from raytide.actors.gang import Gang
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.errors import LeaseLostError, RaytideError

HOLDER = Path(__file__).with_name("holder.py")
WAIT_S = 600.0
MOST_ASKING = 12
"""Users who see that so many wait do not come."""


class Holder(threading.Thread):
    """Holds the gang of a job for some seconds, in this process."""

    def __init__(self, client: ApiClient, job_id: str, seconds: float) -> None:
        super().__init__(name=f"holder of {job_id}", daemon=True)
        self.job_id = job_id
        self.error: RaytideError | None = None
        """The error that the user saw. LeaseLostError is that of a job that was stopped."""
        self._client, self._seconds = client, seconds
        self.start()

    def run(self) -> None:
        try:
            with Gang(self._client, self.job_id, timeout_s=WAIT_S) as gang:
                until = time.monotonic() + self._seconds
                while time.monotonic() < until:
                    gang.wait_change(gang.lease.epoch, timeout_s=0.5)
        except RaytideError as error:
            self.error = error

    @property
    def was_stopped(self) -> bool:
        return isinstance(self.error, LeaseLostError)


def hold_elsewhere(cluster: LocalCluster, job_id: str) -> subprocess.Popen[bytes]:
    """A holder in a process of its own, to be killed."""
    environment = {**os.environ, "PYTHONPATH": cluster.environment()["PYTHONPATH"]}
    return subprocess.Popen(
        [sys.executable, str(HOLDER), str(cluster.run_dir), job_id], env=environment, stderr=subprocess.DEVNULL
    )


class Clients:
    """A trickle of streamed requests, each by the official client in a thread. It counts how each of them ended."""

    def __init__(self, base_url: str, model: str, seed: int, per_s: float = 1.0) -> None:
        self._base_url, self._model, self._per_s = base_url, model, per_s
        self._chance = random.Random(seed)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._asking: list[threading.Thread] = []
        self.ended: Counter[str] = Counter()
        """Requests by outcome: `answered`, or the name of the error."""
        self.first_s: list[float] = []
        """The seconds that each answered request waited for the first of its answer."""
        self.sent = 0
        self._thread = threading.Thread(target=self._trickle, name="clients", daemon=True)
        self._thread.start()

    def close(self, *, timeout_s: float) -> int:
        """Send no more; how many requests have not ended after that time."""
        self._over.set()
        self._thread.join()
        deadline = time.monotonic() + timeout_s
        for thread in self._asking:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._asking)

    def ask(self) -> str:
        """One request from beginning to end."""
        from openai import OpenAI, OpenAIError

        tokens, asked_s = 24, time.monotonic()
        try:
            with OpenAI(base_url=self._base_url, api_key="none", max_retries=0, timeout=WAIT_S) as client:
                stream = client.completions.create(
                    model=self._model,
                    prompt="def main(",
                    max_tokens=tokens,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
                chunks = iter(stream)
                used, first_s = [next(chunks).usage], time.monotonic() - asked_s
                used += [chunk.usage for chunk in chunks]
        except OpenAIError as error:
            return type(error).__name__
        except Exception as error:  # the client does not wrap a stream that is cut: httpx.RemoteProtocolError
            return f"{type(error).__module__}.{type(error).__name__}"
        if [usage.completion_tokens for usage in used if usage is not None] != [tokens]:
            return "cut short"
        self.first_s.append(first_s)
        return "answered"

    def _trickle(self) -> None:
        while not self._over.wait(self._chance.expovariate(self._per_s)):
            if self.sent - self.ended.total() >= MOST_ASKING:
                continue
            thread = threading.Thread(target=self._count, name="request", daemon=True)
            self._asking.append(thread)
            thread.start()
            self.sent += 1

    def _count(self) -> None:
        how = self.ask()
        with self._lock:
            self.ended[how] += 1
