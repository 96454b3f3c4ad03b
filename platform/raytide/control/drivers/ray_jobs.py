"""Runs managed drivers as Ray jobs. Each attempt of a job is one Ray job with a fixed submission id, so no attempt is
started twice.

The module uses Ray's job REST API and does not import Ray.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from raytide.core.errors import ClusterError
from raytide.queue.lifecycle.jobs import WITHOUT_MEMBERS, DriverKey, DriverStatus

_TIMEOUT_S = 10.0
_PREFIX = "raytide-"
_SUBMISSION = re.compile(rf"{_PREFIX}(job-[1-9][0-9]*)-(0|[1-9][0-9]{{0,8}})")
"""The submission ids of raytide's drivers. Users may give their own Ray jobs any other id."""
_HEAD = "raytide_head"
"""The metadata key of a submission under which the epoch of its driver's head is stored."""
_MESSAGE_CHARS = 300
_AGENTS = 1000
"""The number of attempts for which the address of their agent is cached."""
_LOG = "job-driver-{}.log"
"""Ray's name of the file with a driver's output, which the agent of its node serves."""


class RayJobs:
    """Starts, lists and stops the drivers of jobs through Ray's dashboard. The HTTP `headers` authenticate the
    requests. In a cluster with several heads, `head_epoch` is the epoch of the leading head.
    """

    def __init__(self, dashboard_url: str, run_dir: Path, headers: Mapping[str, str], head_epoch: int = 0) -> None:
        # No proxy: the addresses are internal, and the headers contain the cluster's token.
        self._http = httpx.Client(base_url=dashboard_url, timeout=_TIMEOUT_S, headers=headers, trust_env=False)
        self._run_dir, self._head = run_dir, str(head_epoch)
        self._agents: dict[DriverKey, str] = {}
        self._is_watched = False

    def start(self, key: DriverKey) -> None:
        """Submits an attempt of a job to Ray. Has no effect if the attempt was submitted before."""
        argv = [sys.executable, "-m", "raytide.control.drivers.job_driver", str(self._run_dir), key.job_id]
        body = {
            "entrypoint": "exec " + shlex.join(argv),
            "submission_id": _submission_id(key),
            "metadata": {"raytide_job": key.job_id, _HEAD: self._head},
        }
        response = self._call("POST", "/api/jobs/", json=body)
        if not response.is_success and "already exists" not in response.text:
            raise ClusterError(f"Ray refused the driver of {key.job_id}: {response.text.strip()[-300:]}")

    def statuses(self) -> dict[DriverKey, DriverStatus]:
        """Returns the status of every attempt that Ray remembers."""
        found = {}
        for entry in _ok(self._call("GET", "/api/jobs/")).json():
            key = _key(str(entry.get("submission_id") or ""))
            if key is not None:
                found[key] = _status(key, entry, self._head)
        self._have_watched(found.values())
        return found

    def _have_watched(self, found: Iterable[DriverStatus]) -> None:
        """Submits a running attempt again, once in the life of this object.

        Ray refuses the submission, but then watches the drivers: after a takeover, the new head watches the former
        head's drivers only from the first submission to it. Until then it still reports as running those drivers
        that were lost with the former head.
        """
        running = next((status.key for status in found if status.state == "running"), None)
        if running is not None and not self._is_watched:
            self.start(running)
            self._is_watched = True

    def stop(self, key: DriverKey) -> None:
        """Ends the attempt's driver: Ray sends SIGTERM, and SIGKILL three seconds later."""
        self._call("POST", f"/api/jobs/{_submission_id(key)}/stop")

    def forget(self, key: DriverKey) -> None:
        """Removes an attempt that has ended from Ray's list of jobs. Its output stays."""
        response = self._call("DELETE", f"/api/jobs/{_submission_id(key)}")
        if response.status_code != httpx.codes.NOT_FOUND:
            _ok(response)

    def log(self, key: DriverKey, start: int, most: int) -> tuple[bytes, int]:
        """Returns up to `most` bytes of the attempt's output, from byte `start` on, and the output's total size.

        The output is empty and the size 0 if the attempt has none. The output comes from the node's agent, because
        Ray's job service would read all of it into memory.
        """
        address = self._agents.get(key) or self._agent(key)
        if not address:
            return b"", 0
        if len(self._agents) >= _AGENTS:
            self._agents.clear()
        self._agents[key] = address
        return self.file(address, _LOG.format(_submission_id(key)), start, most)

    def file(self, agent: str, name: str, start: int, most: int) -> tuple[bytes, int]:
        """Returns up to `most` bytes of a file in Ray's log folder, from byte `start` on, and the file's size in bytes.
        Returns empty bytes and the size 0 if the file does not exist. `agent` is the address of the agent on the file's
        node."""
        wanted = {"Range": f"bytes={start}-{start + most - 1}"}
        response = self._call("GET", f"{agent}/logs/{name}", headers=wanted)
        if response.status_code == httpx.codes.NOT_FOUND:
            return b"", 0
        size = int(response.headers.get("Content-Range", "/0").rpartition("/")[2])
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return b"", size
        return _ok(response).content, size

    def _agent(self, key: DriverKey) -> str:
        """Returns the address of the agent on the attempt's node, which never changes; empty if it has none yet."""
        response = self._call("GET", f"/api/jobs/{_submission_id(key)}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return self._newest_agent()
        return str(_ok(response).json().get("driver_agent_http_address") or "")

    def _newest_agent(self) -> str:
        """Returns the address of the agent of the newest attempt, for attempts that were forgotten: Ray runs all
        drivers on the head. Returns an empty text if there is no such agent.
        """
        response = self._call("GET", "/api/jobs/")
        if response.status_code == httpx.codes.NOT_FOUND:
            return ""
        found = {
            key: address
            for entry in _ok(response).json()
            if (key := _key(str(entry.get("submission_id") or ""))) is not None
            and (address := str(entry.get("driver_agent_http_address") or ""))
        }
        return found[max(found, key=lambda key: (key.number, key.attempt))] if found else ""

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **kwargs)
            # Its stream refers to the answer: as a cycle, a list of all jobs would stay until a garbage collection.
            answer.stream = httpx.ByteStream(b"")
            return answer
        except httpx.HTTPError as error:
            url = self._http.base_url.join(path).copy_with(raw_path=b"/")
            raise ClusterError(f"Ray does not answer at {url}: {error}.", hint="See logs/head.log.") from None


def _ok(response: httpx.Response) -> httpx.Response:
    if not response.is_success:
        raise ClusterError(f"Ray's job service answered {response.status_code}: {response.text.strip()[-300:]}")
    return response


def _submission_id(key: DriverKey) -> str:
    return f"{_PREFIX}{key.job_id}-{key.attempt}"


def _key(submission_id: str) -> DriverKey | None:
    found = _SUBMISSION.fullmatch(submission_id)
    return None if found is None else DriverKey(found[1], int(found[2]))


def _status(key: DriverKey, entry: dict[str, Any], head: str) -> DriverStatus:
    """Returns the status of a Ray job. FAILED with an exit code from 1 to 127 is the job's own failure; after any other
    failure its driver died."""
    message = _last_line(str(entry.get("message") or ""))
    match str(entry.get("status")):
        case "PENDING" | "RUNNING":
            return DriverStatus(key, "running")
        case "SUCCEEDED":
            return DriverStatus(key, "succeeded")
        case "FAILED" if 0 < (entry.get("driver_exit_code") or 0) < 128:
            return DriverStatus(key, "failed", message)
        case _:
            with_head = str((entry.get("metadata") or {}).get(_HEAD, head)) != head
            without_members = entry.get("driver_exit_code") == WITHOUT_MEMBERS
            return DriverStatus(key, "died", message or "its driver was killed", with_head, without_members)


def _last_line(message: str) -> str:
    """Returns the last line of Ray's message, which is the last line of the driver's output and names the error."""
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[-1][-_MESSAGE_CHARS:] if lines else ""
