"""The store of responses that all gateway processes share: a database in a folder of the head. The size and the age of
the stored responses are limited.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raytide.actors.serving.protocols.responses_api.stored import (
    KEEP_S,
    MAX_RESPONSE_BYTES,
    ResponseOwner,
    StoredResponse,
)
from raytide.core.errors import RaytideError, StorageError
from raytide.gateway.files.database import FileDatabase

_log = logging.getLogger(__name__)
_SWEEP_S = 600.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    team TEXT NOT NULL,
    account TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    record TEXT NOT NULL,
    UNIQUE (team, id)
);
CREATE INDEX IF NOT EXISTS responses_of_account ON responses (team, account, seq, bytes);
CREATE INDEX IF NOT EXISTS expiries ON responses (expires_at);
CREATE TABLE IF NOT EXISTS sizes (
    team TEXT NOT NULL,
    account TEXT NOT NULL,
    count INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (team, account)
);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO sizes VALUES (new.team, new.account, 1, new.bytes)
    ON CONFLICT DO UPDATE SET count = count + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE sizes SET count = count - 1, bytes = bytes - old.bytes WHERE team = old.team AND account = old.account;
    DELETE FROM sizes WHERE team = old.team AND account = old.account AND count <= 0;
END;
"""


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """The limits on stored responses: those of one key's account, of one team, and of all teams together. When a limit
    is exceeded, the oldest responses that count towards this limit are removed.
    """

    account_responses: int = 10_000
    account_bytes: int = 256 << 20
    team_bytes: int = 1 << 30
    total_bytes: int = 4 << 30
    free_bytes: int = 1 << 30
    """The bytes that stored responses leave free on the disk, which may also hold the cluster's state."""


class SharedResponses:
    """A ResponseStore that the gateway processes of a cluster share. `run` removes expired responses."""

    def __init__(
        self, folder: Path, limits: ResponseLimits | None = None, now_s: Callable[[], float] = time.time
    ) -> None:
        self._database = FileDatabase(folder, "responses.db", _SCHEMA, has_log=True)
        self._limits, self._now_s = limits or ResponseLimits(), now_s

    async def run(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.sweep)
            except RaytideError as error:
                _log.warning("expired responses are not removed: %s", error)
            await asyncio.sleep(_SWEEP_S)

    async def add(self, owner: ResponseOwner, stored: StoredResponse) -> None:
        text = stored.to_json()
        if len(text) <= MAX_RESPONSE_BYTES:
            await asyncio.to_thread(self._add, owner, stored.id, text)

    async def get(self, team: str, response_id: str) -> StoredResponse | None:
        text = await asyncio.to_thread(self._record, team, response_id)
        return None if text is None else StoredResponse.from_json(text)

    async def delete(self, team: str, response_id: str) -> bool:
        return await asyncio.to_thread(self._delete, team, response_id)

    def sweep(self) -> None:
        with self._database.write() as connection:
            connection.execute("DELETE FROM responses WHERE expires_at < ?", (int(self._now_s()),))

    def _add(self, owner: ResponseOwner, response_id: str, text: str) -> None:
        if shutil.disk_usage(self._database.folder).free - len(text) < self._limits.free_bytes:
            raise StorageError("the head has no more room for responses.", hint="Free space there.")
        expires_at = int(self._now_s()) + KEEP_S
        row = (response_id, owner.team, owner.account, len(text), expires_at, text)
        with self._database.write() as connection:
            # The row of a batch whose gateway was killed has stored it before, under the same id.
            connection.execute("DELETE FROM responses WHERE team = ? AND id = ?", (owner.team, response_id))
            connection.execute(
                "INSERT INTO responses (id, team, account, bytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)", row
            )
            self._remove_oldest(connection, owner)

    def _remove_oldest(self, connection: sqlite3.Connection, owner: ResponseOwner) -> None:
        limits, own = self._limits, (owner.team, owner.account)
        for where, values, count, size in (
            ("team = ? AND account = ?", own, limits.account_responses, limits.account_bytes),
            ("team = ?", own[:1], None, limits.team_bytes),
            ("1", (), None, limits.total_bytes),
        ):
            sums = f"SELECT coalesce(sum(count), 0), coalesce(sum(bytes), 0) FROM sizes WHERE {where}"  # nosec B608
            oldest = f"SELECT seq FROM responses WHERE {where} ORDER BY seq LIMIT 1"  # nosec B608
            while True:
                responses, kept = connection.execute(sums, values).fetchone()
                if kept <= size and (count is None or responses <= count):
                    break
                connection.execute(f"DELETE FROM responses WHERE seq = ({oldest})", values)  # nosec B608

    def _record(self, team: str, response_id: str) -> str | None:
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT record FROM responses WHERE team = ? AND id = ? AND expires_at >= ?",
                (team, response_id, int(self._now_s())),
            ).fetchone()
        return None if row is None else str(row["record"])

    def _delete(self, team: str, response_id: str) -> bool:
        with self._database.write() as connection:
            found = connection.execute(
                "DELETE FROM responses WHERE team = ? AND id = ? AND expires_at >= ?",
                (team, response_id, int(self._now_s())),
            )
            return found.rowcount > 0
