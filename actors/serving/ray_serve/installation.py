"""Installs the packages of a replica. Stores pip's error in the GCS, where the controller and other replicas read it.

After a temporary failure, the same replica tries again, with growing waits. After a permanent failure, the packages
are not tried again on that node until the endpoint is deployed anew. The replica's reaction to a permanent failure
depends on the deployment:

- If no replica of the deployment has become ready yet, the replica fails, and Serve gives the
  deployment up.
- Otherwise the replica waits until Serve ends it, because Serve would restart a failed replica for
  ever.

The GCS keeps only one failure per endpoint. A failure on another node replaces the stored failure, and a success
deletes it. A node whose failure is no longer stored tries the packages again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from raytide.actors.gang.packages import interpreter_with
from raytide.actors.serving.ray_serve.keys import KV_NAMESPACE, begun_key, failure_of, install_key, install_record
from raytide.core import ray_internals
from raytide.core.errors import ClusterError, ConfigError, StorageError
from raytide.core.logs import logger
from raytide.core.objects.endpoint_load import InstallFailure

WAITS_S = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)
"""The waits between tries of one replica, which then ends: Serve starts another one, or gives the endpoint up."""
_GCS_TIMEOUT_S = 10.0

log = logger(__name__)


async def wait_for_end() -> None:
    """Waits until Serve ends this process."""
    await asyncio.Event().wait()


class KeyValues(Protocol):
    """The interface of a key-value store that all replicas share."""

    def get(self, key: bytes) -> bytes | None: ...

    def put(self, key: bytes, value: bytes) -> None: ...

    def delete(self, key: bytes) -> None: ...


class GcsKeyValues:
    """The key-value store in the GCS."""

    def get(self, key: bytes) -> bytes | None:
        gcs = ray_internals.connected_gcs()
        found: bytes | None = gcs.internal_kv_get(key, KV_NAMESPACE, timeout=_GCS_TIMEOUT_S)
        return found

    def put(self, key: bytes, value: bytes) -> None:
        ray_internals.connected_gcs().internal_kv_put(key, value, True, KV_NAMESPACE, timeout=_GCS_TIMEOUT_S)

    def delete(self, key: bytes) -> None:
        ray_internals.connected_gcs().internal_kv_del(key, False, KV_NAMESPACE, timeout=_GCS_TIMEOUT_S)


class Installation:
    """Installs the packages of one replica on one node. `node` is Ray's id of the node."""

    def __init__(
        self,
        endpoint: str,
        node: str,
        records: KeyValues,
        install: Callable[[Sequence[str]], str] = interpreter_with,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._key, self._begun_key = install_key(endpoint), begun_key(endpoint)
        self._node, self._records, self._install, self._sleep = node, records, install, sleep

    async def python(self, requirements: Sequence[str]) -> str:
        """Returns the path of a Python interpreter with the required packages. After a temporary failure, waits and
        tries again. If all tries fail, raises the last error of `interpreter_with`.

        After a permanent failure, raises the error if no replica of the deployment has become ready yet. If a
        replica has become ready before, waits until Serve ends this replica, because a restarted replica would fail
        in the same way.
        """
        waits = iter(WAITS_S)
        while True:
            try:
                python = await asyncio.to_thread(self._try, requirements)
            except ConfigError as error:
                if not await asyncio.to_thread(self._has_begun):
                    raise
                log.error("a replica cannot start before its endpoint is deployed anew", extra={"error": str(error)})
                await wait_for_end()
            except (ClusterError, StorageError) as error:
                if (wait_s := next(waits, None)) is None:
                    raise
                log.warning("packages are tried again", extra={"error": str(error), "wait_s": wait_s})
                await self._sleep(wait_s)
            else:
                return python

    def begun(self) -> None:
        """Records that a replica of the current deployment has become ready."""
        self._records.put(self._begun_key, b"1")

    def _try(self, requirements: Sequence[str]) -> str:
        if not requirements:
            return self._install(requirements)
        known = failure_of(self._records.get(self._key))
        if known is not None and known.is_final and known.node == self._node:
            raise ConfigError(known.why, hint="Correct `pip` in the spec, or pip's configuration on the nodes.")
        try:
            python = self._install(requirements)
        except (ConfigError, ClusterError, StorageError) as error:
            failure = InstallFailure(str(error), self._node, is_final=isinstance(error, ConfigError))
            self._records.put(self._key, install_record(failure))
            raise
        if known is not None:
            self._records.delete(self._key)
        return python

    def _has_begun(self) -> bool:
        return self._records.get(self._begun_key) is not None
