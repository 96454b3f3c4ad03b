"""Reads the endpoints and replicas of the cluster from Ray's GCS, without joining the Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raytide.actors.serving.ray_serve.keys import KV_NAMESPACE, ROUTES, ReplicaAddress
from raytide.core import ray_internals
from raytide.core.errors import RaytideError
from raytide.core.logs import logger
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.specs.rollout import REVISION_SEPARATOR
from raytide.registry.rollout.routes import EndpointRoute, RolloutRoute

log = logger(__name__)

PERIOD_S = 0.25
_IDLE_PERIOD_S = 1.0
"""The seconds between two polls while there are no endpoints."""
_TIMEOUT_S = 4.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class EndpointEntry:
    """An endpoint as it was last deployed, with its rollout and the addresses of its replicas by replica id."""

    spec: ServeSpec
    """The spec of the application that serves it, with the application's name."""
    created_at_s: float
    replicas: Mapping[str, ReplicaAddress] = field(default_factory=dict)
    revision: int = 0
    """The number of the revision; 0 while it is unknown."""
    rollout: RolloutRoute | None = None
    challenger: EndpointEntry | None = None
    """The entry of the rollout's challenger; None without a rollout."""


Listing = dict[str, EndpointEntry]


class Directory:
    """Polls the GCS in a background thread. If the listing of the endpoints has changed, the background thread calls
    `on_change` with the new listing. While the GCS does not answer, the last listing stays valid.
    """

    def __init__(self, gcs_address: str, on_change: Callable[[Listing], None]) -> None:
        self._address, self._on_change = gcs_address, on_change
        self._stopping = threading.Event()
        self._reports: dict[bytes, bytes | None] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gateway-directory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(_TIMEOUT_S + 1)

    def report(self, key: bytes, value: bytes | None) -> None:
        """Queues a write of `value` under `key` to the GCS's key-value store. The next poll performs the write.

        A value of None deletes the key.
        """
        with self._lock:
            self._reports[key] = value

    def _run(self) -> None:
        gcs: Any = None
        seen: dict[bytes, bytes] | None = None
        while not self._stopping.wait(PERIOD_S if seen else max(PERIOD_S, _IDLE_PERIOD_S)):
            try:
                gcs = gcs or ray_internals.gcs_client(self._address)
                self._write_reports(gcs)
                found = _read(gcs)
                if found != seen:
                    self._on_change(listing(found))
                    seen = found
            except Exception as error:  # the GCS restarts, or is far away: the gateway serves what it knows
                log.warning("the GCS does not answer the gateway", extra={"error": repr(error)})
                gcs = None
                self._stopping.wait(_RETRY_S)

    def _write_reports(self, gcs: Any) -> None:
        with self._lock:
            reports, self._reports = self._reports, {}
        try:
            for key, value in list(reports.items()):
                if value is None:
                    gcs.internal_kv_del(key, False, KV_NAMESPACE, timeout=_TIMEOUT_S)
                else:
                    gcs.internal_kv_put(key, value, True, KV_NAMESPACE, timeout=_TIMEOUT_S)
                del reports[key]
        finally:  # what was not written is written later, unless there is a newer value
            with self._lock:
                self._reports = {**reports, **self._reports}


def _read(gcs: Any) -> dict[bytes, bytes]:
    found = gcs.internal_kv_keys(b"", KV_NAMESPACE, timeout=_TIMEOUT_S)
    keys = [key for key in found if key.endswith(b"/spec") or b"/replica/" in key or key.startswith(ROUTES)]
    return dict(gcs.internal_kv_multi_get(keys, KV_NAMESPACE, timeout=_TIMEOUT_S)) if keys else {}


def listing(found: Mapping[bytes, bytes]) -> Listing:
    """Returns the endpoints that the key-value pairs `found` describe. Pairs that cannot be read are skipped.

    An application that serves a revision in a rollout is left out if no route names the application. In that case the
    rollout is over or has not begun.
    """
    applications: Listing = {}
    replicas: dict[str, dict[str, ReplicaAddress]] = {}
    routes: dict[str, EndpointRoute] = {}
    for key, value in found.items():
        try:
            name, kind, rest = (*key.decode().split("/", 2), "")[:3]
            if key.startswith(ROUTES):
                routes[kind] = EndpointRoute.model_validate_json(value)
            elif kind == "replica":
                replicas.setdefault(name, {})[rest] = ReplicaAddress.parse(value)
            else:
                created_at_s, _, spec = value.decode().partition(" ")
                # The API has checked the spec's size, which is larger with its defaults.
                applications[name] = EndpointEntry(ServeSpec.model_validate_json(spec), float(created_at_s))
        except (ValueError, TypeError, RaytideError) as error:
            log.warning("a key of Serve's cannot be read", extra={"key": repr(key), "error": str(error)})
    applications = {name: replace(each, replicas=replicas.get(name, {})) for name, each in applications.items()}
    return {
        **{name: each for name, each in applications.items() if REVISION_SEPARATOR not in name},
        **{name: _routed(route, applications) for name, route in routes.items() if route.application in applications},
    }


def _routed(route: EndpointRoute, applications: Listing) -> EndpointEntry:
    entry = replace(applications[route.application], revision=route.revision)
    rollout = route.rollout
    challenger = applications.get(rollout.challenger) if rollout is not None else None
    if rollout is None or challenger is None:
        return entry
    return replace(entry, rollout=rollout, challenger=replace(challenger, revision=rollout.split.challenger))
