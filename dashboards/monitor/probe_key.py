"""The API key of probes, where the gateway demands one: made once, and kept in a file of raytide's user."""

from __future__ import annotations

import asyncio
from pathlib import Path

from raytide.control.client.api_client import ApiClient
from raytide.core.errors import RaytideError
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.logs import logger

FILE = "probe-key.json"
NAME = "raytide-probes"

log = logger(__name__)


class ProbeKey:
    """Returns the key when it is called; empty where none is needed. `team` pays for the probes."""

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

    def _find(self) -> str:
        """Returns the kept key, or a new one if that is not valid any more."""
        try:
            kept = read_json(self._path) or {}
        except ValueError:
            kept = {}
        client = ApiClient.from_run_dir(self._folder)
        valid = {key["key"]["id"] for key in client.call("GET", "/v1/keys", query={"limit": 1000})}
        if kept.get("id") in valid:
            return str(kept["secret"])
        made = client.call("POST", "/v1/keys", {"name": NAME, "team": self._team})
        write_json(self._path, {"id": made["key"]["id"], "secret": made["secret"]})
        return str(made["secret"])
