"""Sends requests with known answers to endpoints and keeps the last results. The requests go through the gateway, like
a user's.

A probe has a header by which the gateway counts it as `probe`. SLOs are measured without probes.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from raytide.actors.serving.openai_api.respond import PROBE
from raytide.control.client.api_client import ApiClient
from raytide.core.errors import NotFoundError, RaytideError
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.logs import logger
from raytide.core.telemetry.catalogue import monitoring as m
from raytide.core.telemetry.metrics import HistogramRecorder, MetricSample, Sample
from raytide.core.telemetry.settings import ProbeSection
from raytide.dashboards.alerts.service import PROBES_FILE

log = logger(__name__)

FILE, NAME = "probe-key.json", "raytide-probes"
"""The file that keeps the API key of probes, and the name of that key."""
_MOST_ANSWER = 500
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ProbeResult:
    endpoint: str
    probe: str
    at_s: float
    success: bool
    """True if the probe was answered."""
    right: bool
    """True if the answer was the expected one."""
    seconds: float
    answer: str = ""
    error: str = ""


class Prober:
    """Sends the probes of one cluster."""

    def __init__(
        self,
        probes: Sequence[ProbeSection],
        serve_url: str,
        http: httpx.AsyncClient,
        key: ProbeKey,
        folder: Path,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._probes, self._serve_url, self._http, self._key = probes, serve_url, http, key
        self._folder, self._now_s = folder, now_s
        self._results: dict[tuple[str, str], ProbeResult] = {}
        self._seconds = {(p.endpoint, p.name): HistogramRecorder(m.PROBE_SECONDS) for p in probes}

    async def run(self) -> None:
        """Sends each probe at its own interval, until this task is cancelled."""
        await asyncio.gather(*(self._repeat(probe) for probe in self._probes))

    async def _repeat(self, probe: ProbeSection) -> None:
        await asyncio.sleep(random.uniform(0, min(5.0, probe.every_s)))  # probes do not come all at once
        while True:
            began_s = time.monotonic()
            try:
                await self.send(probe)
            except Exception as error:  # one that breaks must not end the others
                log.warning("a probe failed", extra={"endpoint": probe.endpoint, "error": repr(error)})
            await asyncio.sleep(max(0.0, probe.every_s - (time.monotonic() - began_s)))

    async def send(self, probe: ProbeSection) -> ProbeResult:
        """Sends one probe, and writes the last results of all probes to their file."""
        at_s, began_s = self._now_s(), time.perf_counter()
        answer, error = "", ""
        try:
            async with asyncio.timeout(probe.timeout_s):
                answer = await self._ask(probe)
        except TimeoutError:
            error = f"no answer within {probe.timeout_s:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as failure:
            error = str(failure) or type(failure).__name__
        seconds = time.perf_counter() - began_s
        is_right = not error and re.search(probe.expect, answer) is not None
        result = ProbeResult(
            probe.endpoint, probe.name, at_s, not error, is_right, seconds, answer[:_MOST_ANSWER], error[:_MOST_ANSWER]
        )
        if result.success:
            self._seconds[probe.endpoint, probe.name].observe(seconds)
        self._results[probe.endpoint, probe.name] = result
        try:
            await asyncio.to_thread(self._write)
        except OSError as failure:
            log.warning("the results of probes cannot be written", extra={"error": str(failure)})
        return result

    async def _ask(self, probe: ProbeSection) -> str:
        """Returns the text of the endpoint's answer. Raises ValueError if the request is refused."""
        base = f"{self._serve_url}/{probe.endpoint}/v1"
        body: dict[str, object] = {"model": probe.endpoint, "max_tokens": probe.max_tokens, "temperature": 0}
        if probe.api == "chat":
            url, body = f"{base}/chat/completions", {**body, "messages": [{"role": "user", "content": probe.prompt}]}
        else:
            url, body = f"{base}/completions", {**body, "prompt": probe.prompt}
        key = await self._key()
        headers = {PROBE: probe.name, **({"Authorization": f"Bearer {key}"} if key else {})}
        parts, size = [], 0
        async with self._http.stream("POST", url, json=body, headers=headers, timeout=None) as response:
            async for part in response.aiter_bytes():
                size += len(part)
                if size > _MOST_BYTES:
                    raise ValueError("the answer is larger than 1 MiB")
                parts.append(part)
        text = b"".join(parts)
        if response.status_code == httpx.codes.UNAUTHORIZED:  # somebody may have revoked the key
            self._key.forget(key)
        if not response.is_success:
            raise ValueError(f"{response.status_code}: {text[:_MOST_ANSWER].decode('utf-8', 'replace')}")
        choice = json.loads(text)["choices"][0]
        return str(choice["message"]["content"] or "") if probe.api == "chat" else str(choice["text"])

    def _write(self) -> None:
        results = [asdict(result) for _, result in sorted(self._results.items())]
        write_json(self._folder / PROBES_FILE, {"probes": results}, is_kept=False)

    def samples(self) -> Iterable[Sample]:
        """Yields metrics about the probes that were sent."""
        yield from self._last(self._results.values())
        for name, seconds in self._seconds.items():
            if name in self._results:
                yield seconds.sample(*name)

    def _last(self, results: Iterable[ProbeResult]) -> Iterator[Sample]:
        for result in results:
            names = (result.endpoint, result.probe)
            yield MetricSample(m.PROBE_SUCCESS, float(result.success), names)
            yield MetricSample(m.PROBE_ANSWER_RIGHT, float(result.right), names)


class ProbeKey:
    """An async function that returns the API key with which probes are sent. The key is empty if the gateway requires
    none.

    `team` is the team that pays for the probes. The key is kept in a file that only raytide's user can read. The first
    call creates a key if the file has none, or one that is no longer valid. Later calls return the same key until it
    is forgotten.
    """

    def __init__(self, folder: Path, team: str, is_needed: bool) -> None:
        self._path, self._folder, self._team, self._is_needed = folder / FILE, folder, team, is_needed
        self._secret: str | None = None
        self._lock = asyncio.Lock()

    async def __call__(self) -> str:
        if not self._is_needed:
            return ""
        async with self._lock:
            if not self._secret:
                try:
                    self._secret = await asyncio.to_thread(self._find)
                except RaytideError as error:  # the next probe tries again
                    log.warning("there is no key for probes", extra={"error": str(error)})
            return self._secret or ""

    def forget(self, secret: str) -> None:
        """Makes the next call check whether this key is still valid, and return a new one if it is not."""
        if secret == self._secret:  # else another probe has done so, and there is a newer key
            self._secret = None

    def _find(self) -> str:
        """Returns the kept key, or a new key if the kept one is no longer valid."""
        try:
            kept = read_json(self._path) or {}
        except ValueError:
            kept = {}
        client = ApiClient.from_run_dir(self._folder)
        if (key_id := kept.get("id")) and self._is_valid(client, str(key_id)):
            return str(kept["secret"])
        made = client.call("POST", "/v1/keys", {"name": NAME, "team": self._team})
        write_json(self._path, {"id": made["key"]["id"], "secret": made["secret"]})
        return str(made["secret"])

    @staticmethod
    def _is_valid(client: ApiClient, key_id: str) -> bool:
        try:
            return client.key(key_id).key.is_valid(time.time())
        except NotFoundError:
            return False
