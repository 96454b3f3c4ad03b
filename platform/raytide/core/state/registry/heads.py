"""The lease of a cluster's head, and the list of waiting machines. Both exist only in clusters in which several
machines can be the head.

The head consists of Ray's GCS, the controller, the API and the gateways of one machine. The head's lease is separate
from the controller's lease. A small loop renews the head's lease, so the lease can be short even if a tick takes
long.

A machine that takes over the lease raises the epoch, and ends the controller's lease in the same transaction. Every
write by a process of the head checks the epoch (`Database.fence`). So a former head can write nothing from that
moment on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from raytide.core.errors import ConflictError
from raytide.core.state.database import Database
from raytide.core.state.tables import leaders

CONTROLLER = "controller"
_HEAD, _RENEWAL, _STANDBY = "head", "head-renewal", "standby:"
"""The rows of `leaders`. Renewals have a row of their own, because each write of a process locks the head's row."""
_LIFE = "head-life"
"""The row of `leaders` with the number of the cluster's present life, from its start to `raytide down`."""
_ENDED = "-"
"""The holder of the lease after `raytide down`, on which the waiting machines also end."""
_SEEN_S = 15.0


@dataclass(frozen=True, slots=True)
class HeadView:
    """The machine that leads, and the machines that wait."""

    leader: str
    epoch: int
    standbys: tuple[str, ...] = ()


class HeadLease:
    """The lease of the head, as one machine sees it. If the lease is not renewed for `lease_s` seconds, another machine
    takes over as the head.
    """

    def __init__(
        self, database: Database, holder: str, lease_s: float, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._db, self._holder, self._lease_s, self._monotonic_s = database, holder, lease_s, monotonic_s
        self.epoch = 0
        """The epoch of the head's lease while this machine leads; 0 while it waits."""
        self.life = 0
        """A random number that is new after `raytide down` and in a new database; 0 in a cluster of an earlier release.
        Tables of Ray from another life must not be used: they have drivers, actors and endpoints of that life.
        """
        self._renewed_s = 0.0
        self._watched: tuple[int, int] | None = None
        self._watched_s = 0.0

    def take(self) -> str:
        """Tries to become the head. Returns an empty string on success, else the name of the present head."""
        began_s = self._monotonic_s()
        try:
            with self._db.write() as c:
                head = c.execute(_row(_HEAD)).first()
                renewal = c.execute(_row(_RENEWAL)).first()
                if head is None or renewal is None:
                    for name in (_HEAD, _RENEWAL):
                        c.execute(leaders.insert(), {"name": name, "epoch": 0, "holder": self._holder, "renewals": 0})
                elif head.holder not in ("", _ENDED, self._holder) and not self._is_over(head.epoch, renewal.renewals):
                    return str(head.holder)
                c.execute(_row(_HEAD).with_for_update()).one()  # waits for the writes of the former head
                epoch = c.execute(sa.select(leaders.c.epoch).where(leaders.c.name == _HEAD)).scalar_one() + 1
                if head is not None and epoch != head.epoch + 1:
                    return "another machine"
                _set(c, _HEAD, epoch=epoch, holder=self._holder)
                _set(c, _RENEWAL, epoch=epoch, holder=self._holder)
                _set(c, CONTROLLER, epoch=leaders.c.epoch + 1, holder="")
                if head is None or head.holder == _ENDED:
                    c.execute(leaders.delete().where(leaders.c.name == _LIFE))
                    number = secrets.randbits(48)
                    c.execute(leaders.insert(), {"name": _LIFE, "epoch": 0, "holder": "", "renewals": number})
                life = c.execute(_row(_LIFE)).first()
                c.execute(leaders.delete().where(leaders.c.name == _STANDBY + self._holder))
        except ConflictError:  # another machine inserted the first rows
            return "another machine"
        self.epoch, self._renewed_s = epoch, began_s
        self.life = 0 if life is None else int(life.renewals)
        return ""

    def renew(self) -> None:
        """Renews the lease. Raises ConflictError if another machine took over."""
        began_s = self._monotonic_s()
        with self._db.write() as c:
            mine = sa.and_(leaders.c.name == _RENEWAL, leaders.c.epoch == self.epoch)
            if c.execute(leaders.update().where(mine).values(renewals=leaders.c.renewals + 1)).rowcount != 1:
                raise _replaced()
        self._renewed_s = began_s

    @property
    def left_s(self) -> float:
        """The seconds until another machine may take over, unless the lease is renewed in time."""
        return self._renewed_s + self._lease_s - self._monotonic_s()

    def resign(self, *, ends: bool = False) -> None:
        """Gives up the lease, so that a waiting machine can take over at once. With `ends`, the waiting machines learn
        that the cluster has ended. Does nothing if another machine has taken over already."""
        if self.epoch:
            with self._db.write() as c:
                mine = sa.and_(leaders.c.name == _HEAD, leaders.c.epoch == self.epoch)
                c.execute(leaders.update().where(mine).values(holder=_ENDED if ends else ""))
            self.epoch = 0

    def has_ended(self) -> bool:
        """Returns whether `raytide down` ended the cluster."""
        with self._db.read() as c:
            row = c.execute(_row(_HEAD)).first()
            return row is not None and row.holder == _ENDED

    def report_waiting(self) -> None:
        """Records that this machine is waiting, with the current time of the database's clock. The machine must call
        this method repeatedly, because a record counts only for some seconds.
        """
        name = _STANDBY + self._holder
        with self._db.write() as c:
            now_s = c.execute(_DATABASE_TIME).scalar_one()
            if c.execute(leaders.update().where(leaders.c.name == name).values(renewals=now_s)).rowcount == 0:
                c.execute(leaders.insert(), {"name": name, "epoch": 0, "holder": self._holder, "renewals": now_s})

    def stop_waiting(self) -> None:
        with self._db.write() as c:
            c.execute(leaders.delete().where(leaders.c.name == _STANDBY + self._holder))

    def _is_over(self, epoch: int, renewals: int) -> bool:
        """Returns whether the lease was not renewed for `lease_s` while this process watched it."""
        if self._watched != (epoch, renewals):
            self._watched, self._watched_s = (epoch, renewals), self._monotonic_s()
        return self._monotonic_s() - self._watched_s >= self._lease_s


_DATABASE_TIME = sa.select(sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()), sa.BigInteger))


def check_head(c: sa.Connection, epoch: int) -> None:
    """Raises ConflictError unless `epoch` is the epoch of the present head. The check holds until the end of the
    transaction.
    """
    found = c.execute(sa.select(leaders.c.epoch).where(leaders.c.name == _HEAD).with_for_update(read=True)).first()
    if found is None or found.epoch != epoch:
        raise _replaced()


def view_heads(c: sa.Connection) -> HeadView | None:
    """Returns the machine that leads and the machines that wait. Returns None in a cluster with one head."""
    rows = {row.name: row for row in c.execute(leaders.select())}
    if _HEAD not in rows:
        return None
    now_s = c.execute(_DATABASE_TIME).scalar_one()
    waiting = [row for name, row in sorted(rows.items()) if name.startswith(_STANDBY)]
    seen = tuple(row.holder for row in waiting if now_s - row.renewals <= _SEEN_S)
    return HeadView(rows[_HEAD].holder, rows[_HEAD].epoch, seen)


def _row(name: str) -> sa.Select[tuple[str, int, str, int]]:
    return sa.select(leaders).where(leaders.c.name == name)


def _set(c: sa.Connection, name: str, **values: object) -> None:
    c.execute(leaders.update().where(leaders.c.name == name).values(**values))


def _replaced() -> ConflictError:
    return ConflictError(
        "this head was replaced: another machine leads now.",
        hint="Ask the cluster's address: `raytide status` names the head that leads.",
    )
