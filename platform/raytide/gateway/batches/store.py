"""Stores the batches of all teams in the SQLite database that lists the uploaded files."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raytide.actors.serving.openai_api.errors import invalid
from raytide.core.telemetry.catalogue import application
from raytide.core.telemetry.metrics import MetricSample
from raytide.gateway.batches.objects import FINAL, BatchList, BatchObject, BatchRequest, BatchStatus
from raytide.gateway.files.store import FileStore, PartialFile

_WINDOW_S = 24 * 3600
_ORDER: tuple[BatchStatus, ...] = (
    *("validating", "in_progress", "finalizing", "cancelling"),
    *("failed", "completed", "expired", "cancelled"),
)
"""The states of a batch in order; a batch never moves back."""
MOST_SHOWN = 20
"""The most batches that the metrics show."""
MAX_UNFINISHED = 100
"""The most batches of one team that have not ended."""
_KEPT_S = 30 * 86_400
"""The seconds for which a batch is kept after its end."""
_SWEPT_AT_ONCE = 1000
"""The most batches that one sweep looks at, the oldest that have ended."""


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    id: str
    team: str
    account: str
    """The account of the API key that created the batch, under whose limits its rows run; empty if it was created
    without a key.
    """


class BatchStore:
    """The batches of all teams. Methods block on the disk and may run in any thread of any gateway process."""

    def __init__(self, files: FileStore, now_s: Callable[[], float] = time.time) -> None:
        self.files, self._now_s = files, now_s
        self._database = files.database

    def create(self, request: BatchRequest, team: str, account: str) -> BatchObject:
        """Creates a batch whose requests are the rows of an uploaded file. The file cannot be deleted until the batch
        ends.

        Raises an ApiError: 404 if the team has no such file, and 400 if the file has another purpose, if the team
        has too many unfinished batches, or if the files of the team or of the cluster have reached a limit.
        """
        source = self.files.get(team, request.input_file_id)
        if source.purpose != "batch":
            raise invalid(f"{source.id} has the purpose {source.purpose}, not batch.", param="input_file_id")
        now = int(self._now_s())
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=request.endpoint,
            input_file_id=source.id,
            completion_window=request.completion_window,
            status="validating",
            created_at=now,
            expires_at=now + _WINDOW_S,
            metadata=request.metadata,
            output_expires_after=request.output_expires_after,
        )
        with self._database.write() as connection:
            query = "SELECT count(*) FROM batches WHERE team = ? AND is_final = 0"
            if connection.execute(query, (team,)).fetchone()[0] >= MAX_UNFINISHED:
                raise invalid(
                    f"{MAX_UNFINISHED} batches of your team have not ended yet.",
                    param=None,
                    code="batch_limit_exceeded",
                )
            self.files.check_room(connection, team, 0)  # for the results, whose size is not known yet
            held = connection.execute(
                "UPDATE files SET holds = holds + 1 WHERE id = ? AND team = ?", (source.id, team)
            ).rowcount
            if not held:
                raise invalid(f"No such File object: {source.id}.", param="input_file_id", status=404)
            connection.execute(
                "INSERT INTO batches (id, team, account, record) VALUES (?, ?, ?, ?)",
                (batch.id, team, account, _record(batch)),
            )
        return batch

    def get(self, team: str, batch_id: str) -> BatchObject:
        with self._database.read() as connection:
            return _found(connection, batch_id, team)

    def page(self, team: str, *, after: str | None, limit: int) -> BatchList:
        """Returns a page of the team's batches, newest first."""
        with self._database.read() as connection:
            before = None
            if after is not None:
                query = "SELECT seq FROM batches WHERE id = ? AND team = ?"
                before = connection.execute(query, (after, team)).fetchone()
                if before is None:
                    raise invalid(f"There is no batch {after!r} after which to list.", param="after", status=404)
            rows = connection.execute(
                "SELECT record FROM batches WHERE team = ? AND (? IS NULL OR seq < ?) ORDER BY seq DESC LIMIT ?",
                (team, seq := before and before["seq"], seq, limit + 1),
            ).fetchall()
        data = [_batch(row) for row in rows[:limit]]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return BatchList(data=data, first_id=first, last_id=last, has_more=len(rows) > limit)

    def cancel(self, team: str, batch_id: str) -> BatchObject:
        """Marks the batch as cancelling and returns the batch. The process that works on the batch then ends it.

        Has no effect on a batch that is being cancelled. Raises an ApiError: 404 if the team has no such batch, and 409
        if the batch can no longer be cancelled.
        """
        with self._database.write() as connection:
            batch = _found(connection, batch_id, team)
            if batch.status in ("cancelling", "cancelled"):
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise invalid(
                    f"A batch that is {batch.status} cannot be cancelled.", param=None, code="batch_ended", status=409
                )
            return _moved(connection, batch, "cancelling", int(self._now_s()))

    def unfinished(self) -> list[UnfinishedBatch]:
        """Returns the unfinished batches of all teams, oldest first."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id, team, account FROM batches WHERE is_final = 0 ORDER BY seq"
            ).fetchall()
        return [UnfinishedBatch(row["id"], row["team"], row["account"]) for row in rows]

    def samples(self) -> list[MetricSample]:
        """Returns the metrics of the oldest unfinished batches, because these batches expire first."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT team, record FROM batches WHERE is_final = 0 ORDER BY seq LIMIT ?", (MOST_SHOWN,)
            ).fetchall()
        now_s, found = self._now_s(), list[MetricSample]()
        for row in rows:
            batch = _batch(row)
            labels, counts = (batch.id, row["team"]), batch.request_counts
            found.append(MetricSample(application.BATCH_LEFT, max(0.0, batch.expires_at - now_s), labels))
            done = (counts.completed + counts.failed) / counts.total if counts.total else 0.0
            found.append(MetricSample(application.BATCH_DONE, done, labels))
        return found

    def move(self, batch: BatchObject, status: BatchStatus) -> BatchObject:
        """Saves the batch's fields with the status `status` and the time of the change. Returns the saved batch.

        A batch never returns to an earlier status. A batch whose stored status is later than `status`, for example
        because a client has cancelled it, keeps the stored status.
        """
        with self._database.write() as connection:
            found = _found(connection, batch.id)
            kept = found.status if _ORDER.index(found.status) > _ORDER.index(status) else status
            batch = batch.model_copy(update={"cancelling_at": found.cancelling_at, "status": found.status})
            return _moved(connection, batch, kept, int(self._now_s()))

    def finish(
        self, batch: BatchObject, team: str, status: BatchStatus, output: PartialFile, errors: PartialFile
    ) -> BatchObject:
        """Ends the batch and publishes its output file and its error file in one transaction. Empty files are not
        published.
        """
        with self._database.write() as connection:
            found = _found(connection, batch.id)
            if found.status in FINAL:
                return found
            now, expiry = int(self._now_s()), batch.output_expires_after
            ids = {}
            for name, part in (("output", output), ("error", errors)):
                if part.size:
                    added = self.files.insert(
                        connection,
                        part,
                        team,
                        filename=f"{batch.id}_{name}.jsonl",
                        purpose="batch_output",
                        expires_after_s=None if expiry is None else expiry.seconds,
                    )
                    ids[f"{name}_file_id"] = added.id
            batch = batch.model_copy(update={**ids, "cancelling_at": found.cancelling_at})
            return _moved(connection, batch, status, now)

    def sweep(self) -> None:
        """Calls `FileStore.sweep`, and deletes batches that ended more than 30 days ago. The results of a deleted batch
        are kept.
        """
        self.files.sweep()
        ends = ", ".join(f"json_extract(record, '$.{status}_at')" for status in sorted(FINAL))
        with self._database.write() as connection:
            connection.execute(
                "DELETE FROM batches WHERE seq IN (SELECT seq FROM batches WHERE is_final = 1 ORDER BY seq LIMIT ?) "
                f"AND coalesce({ends}) < ?",  # nosec B608
                (_SWEPT_AT_ONCE, int(self._now_s()) - _KEPT_S),
            )

    def input_path(self, batch: BatchObject) -> Path:
        """Returns the path of the batch's input file."""
        return self.files.content_path(batch.input_file_id)


def _moved(connection: sqlite3.Connection, batch: BatchObject, status: BatchStatus, now: int) -> BatchObject:
    times = {} if status in ("validating", batch.status) else {f"{status}_at": now}
    batch = batch.model_copy(update={**times, "status": status})
    is_final = status in FINAL
    connection.execute(
        "UPDATE batches SET record = ?, is_final = ? WHERE id = ?", (_record(batch), int(is_final), batch.id)
    )
    if is_final:
        connection.execute("UPDATE files SET holds = holds - 1 WHERE id = ?", (batch.input_file_id,))
    return batch


def _found(connection: sqlite3.Connection, batch_id: str, team: str | None = None) -> BatchObject:
    row = connection.execute(
        "SELECT record FROM batches WHERE id = ? AND (? IS NULL OR team = ?)", (batch_id, team, team)
    ).fetchone()
    if row is None:
        raise invalid(f"No batch found with id '{batch_id}'.", param="id", status=404)
    return _batch(row)


def _record(batch: BatchObject) -> str:
    expiry = batch.output_expires_after
    hidden = {} if expiry is None else {"output_expires_after": expiry.model_dump()}
    return json.dumps({**batch.model_dump(), **hidden})


def _batch(row: sqlite3.Row) -> BatchObject:
    return BatchObject.model_validate_json(row["record"])
