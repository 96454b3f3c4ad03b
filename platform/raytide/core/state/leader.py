"""Which of several controllers on one store decides: a lease that its holder renews, and an epoch that fences the rest.

Each controller that takes over raises the epoch. Every commit of a controller checks in its own transaction that the
epoch is still the one that it took: one that was cut off or paused while another took over writes nothing any more, and
so does nothing any more, since what is not persisted is not done. Clocks of several machines are never compared: who
waits watches whether the lease changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import sqlalchemy as sa

from raytide.core.errors import ConflictError
from raytide.core.state.database import Database
from raytide.core.state.tables import leaders

__all__ = ["LEASE_S", "Leader"]

LEASE_S = 30.0
"""A holder that has renewed nothing for so long may be replaced. Above the longest pass on the largest clusters."""
_RENEW_S = 3.0
_NAME = "controller"


class Leader:
    """The claim of one controller. `holder` names it; one of the same name is its own predecessor on the same machine,
    which a lock there has shown to be over.
    """

    def __init__(self, database: Database, holder: str, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._db, self._holder, self._monotonic_s = database, holder, monotonic_s
        self._epoch: int | None = None
        self._renewed_s = 0.0
        self._watched: tuple[int, int] | None = None
        self._watched_s = 0.0

    def take(self) -> str:
        """Become the one that decides; empty when that is so, else the name of the one that does. Ask again later."""
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
        except ConflictError:  # two found the table empty: the other one was first
            return "another controller"
        self._epoch, self._renewed_s = epoch, self._monotonic_s()
        return ""

    def fence(self, c: sa.Connection) -> None:
        """Let the rest of this transaction be written only if nobody has taken over; renew the lease when that is due.
        ConflictError otherwise: whoever gets it decides nothing any more."""
        row = c.execute(sa.select(leaders).where(leaders.c.name == _NAME).with_for_update(read=True)).first()
        if row is None or row.epoch != self._epoch:
            holder = "nobody" if row is None or not row.holder else row.holder
            raise ConflictError(
                f"this controller ({self._holder}) was replaced: {holder} decides now.",
                hint="It starts again and waits. Only one cluster should use a state URL.",
            )
        if self._monotonic_s() - self._renewed_s >= _RENEW_S:
            self._update(c, renewals=row.renewals + 1)
            self._renewed_s = self._monotonic_s()

    def check(self) -> None:
        """Raise ConflictError if somebody took over since the last commit; asked before something is done."""
        if self._monotonic_s() - self._renewed_s > LEASE_S / 2:
            with self._db.write() as c:
                self.fence(c)

    def resign(self) -> None:
        """Let the next one begin at once; nothing happens when this one was replaced."""
        if self._epoch is not None:
            with self._db.write() as c:
                mine = sa.and_(leaders.c.name == _NAME, leaders.c.epoch == self._epoch)
                c.execute(leaders.update().where(mine).values(holder=""))
            self._epoch = None

    def _is_over(self, epoch: int, renewals: int) -> bool:
        """Whether the lease has stood still for long enough, as far as this process has watched it."""
        if self._watched != (epoch, renewals):
            self._watched, self._watched_s = (epoch, renewals), self._monotonic_s()
        return self._monotonic_s() - self._watched_s >= LEASE_S

    def _update(self, c: sa.Connection, **values: object) -> None:
        c.execute(leaders.update().where(leaders.c.name == _NAME).values(**values))
