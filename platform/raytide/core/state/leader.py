"""Leader election among controllers that share one store. The leader holds a lease, which it renews. The leader's epoch
prevents earlier leaders from writing.

A controller that takes over raises the epoch. Each commit checks, in its own transaction, that the controller's
epoch is still current. So a controller that was replaced while it was paused or cut off can no longer write. Such a
controller cannot act either, because intents are stored before they are carried out. Clocks of different machines
are never compared: a waiting controller watches whether the lease changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import sqlalchemy as sa

from raytide.core.errors import ConflictError
from raytide.core.state.database import Database
from raytide.core.state.tables import leaders

LEASE_S = 30.0
"""The seconds without renewal after which a holder may be replaced. They exceed the longest tick of the largest
clusters.
"""
_RENEW_S = 3.0
_NAME = "controller"


class Leader:
    """The leadership of one controller, as this controller sees it.

    The lease may already have this controller's name, because the controller's predecessor held it. A lock on the
    machine has then shown that the predecessor is dead. The controller therefore takes such a lease at once.
    """

    def __init__(
        self,
        database: Database,
        holder: str,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        always_asks: bool = False,
    ) -> None:
        """With `always_asks`, `check` reads the database each time, because the lease of a head is shorter than a
        controller's.
        """
        self._db, self._holder, self._monotonic_s = database, holder, monotonic_s
        self._checked_s = 0.0 if always_asks else LEASE_S / 2
        self._epoch: int | None = None
        self._renewed_s = 0.0
        self._watched: tuple[int, int] | None = None
        self._watched_s = 0.0

    def take(self) -> str:
        """Tries to become the leader. Returns an empty string on success, else the name of the present leader."""
        try:
            with self._db.write() as c:
                row = c.execute(sa.select(leaders).where(leaders.c.name == _NAME).with_for_update()).first()
                if row is None:
                    c.execute(leaders.insert(), {"name": _NAME, "epoch": 1, "holder": self._holder, "renewals": 0})
                    epoch = 1
                elif row.holder in ("", self._holder) or self._is_over(row.epoch, row.renewals):
                    epoch = row.epoch + 1
                    self._update(c, epoch=epoch, holder=self._holder)
                else:
                    return str(row.holder)
        except ConflictError:  # another controller inserted the first row
            return "another controller"
        self._epoch, self._renewed_s = epoch, self._monotonic_s()
        return ""

    def fence(self, c: sa.Connection) -> None:
        """Raises ConflictError if another controller has taken over. Otherwise renews the lease if the renewal is due.

        The check holds until the end of this transaction. If the renewal is due, the lock is exclusive from the start:
        two threads that share the row and then both write it would wait for each other.
        """
        is_due = self._is_due()
        row = c.execute(sa.select(leaders).where(leaders.c.name == _NAME).with_for_update(read=not is_due)).first()
        if row is None or row.epoch != self._epoch:
            holder = "no controller" if row is None or not row.holder else row.holder
            raise ConflictError(
                f"this controller ({self._holder}) was replaced: {holder} leads now.",
                hint="It restarts and waits. Give each cluster its own state URL.",
            )
        if is_due and self._is_due():  # another thread may have renewed it while this one waited
            self._update(c, renewals=row.renewals + 1)
            self._renewed_s = self._monotonic_s()

    def check(self) -> None:
        """Raises ConflictError if another controller has taken over. Call it before acting. It reads the store only if
        the last renewal is so old that another controller may have taken over since.
        """
        if self._monotonic_s() - self._renewed_s >= self._checked_s:
            with self._db.write() as c:
                self.fence(c)

    def resign(self) -> None:
        """Gives up the lease, so that another controller can lead at once. Does nothing if another controller has taken
        over already."""
        if self._epoch is not None:
            with self._db.write() as c:
                mine = sa.and_(leaders.c.name == _NAME, leaders.c.epoch == self._epoch)
                c.execute(leaders.update().where(mine).values(holder=""))
            self._epoch = None

    def _is_over(self, epoch: int, renewals: int) -> bool:
        """Returns whether the lease was not renewed for LEASE_S while this process watched it."""
        if self._watched != (epoch, renewals):
            self._watched, self._watched_s = (epoch, renewals), self._monotonic_s()
        return self._monotonic_s() - self._watched_s >= LEASE_S

    def _is_due(self) -> bool:
        return self._monotonic_s() - self._renewed_s >= _RENEW_S

    def _update(self, c: sa.Connection, **values: object) -> None:
        c.execute(leaders.update().where(leaders.c.name == _NAME).values(**values))
