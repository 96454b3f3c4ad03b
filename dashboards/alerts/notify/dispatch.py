"""Sends each receiver messages about those changes of alerts that are new to the receiver.

Messages are grouped, rate-limited and retried until they are delivered.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from raytide.core.errors import RaytideError
from raytide.core.logs import logger
from raytide.core.telemetry.settings import NotifySection, Severity
from raytide.dashboards.alerts.notify.receivers import Receiver
from raytide.dashboards.alerts.records import AlertRecords
from raytide.dashboards.alerts.states import Alert, AlertSource, AlertState

log = logger(__name__)

_RANK: Mapping[Severity, int] = {"info": 0, "warning": 1, "critical": 2}
_HOUR_S = 3600.0
_FIRST_RETRY_S, _LAST_RETRY_S = 5.0, 300.0
_MOST_IN_MESSAGE = 100

Told = Mapping[tuple[str, str], tuple[str, str, float]]


def due_alerts(
    alerts: Iterable[Alert], told: Told, silenced: Collection[str], config: NotifySection, now_s: float
) -> list[Alert]:
    """Returns the alerts of the next message to a receiver, at most 100. The list is empty while the message waits for
    more alerts.

    `told` maps each alert to its state in the last message to this receiver. A receiver gets a message when an episode
    of an alert begins and when it ends, and repetitions in between.
    """
    due: list[Alert] = []
    waited_s = 0.0
    for alert in alerts:
        if alert.name in silenced or _RANK[alert.severity] < _RANK[config.least_severity]:
            continue
        if alert.state is AlertState.PENDING and alert.fired_at_s is not None:
            alert = replace(alert, state=AlertState.RESOLVED)  # its last episode is over, and the next has not begun
        episode, state, at_s = told.get((alert.source, alert.id), ("", "", 0.0))
        is_told = episode == alert.episode and state == alert.state
        if alert.state is AlertState.FIRING:
            is_due = not is_told or now_s - at_s >= config.repeat_s
        else:
            is_due = alert.state is AlertState.RESOLVED and episode == alert.episode and not is_told
        if is_due:
            due.append(alert)
            is_ahead = alert.since_s > now_s  # the clock was set back
            waited_s = max(waited_s, config.group_wait_s if is_ahead else now_s - alert.since_s)
    return due[:_MOST_IN_MESSAGE] if waited_s >= config.group_wait_s else []


@dataclass(slots=True)
class _Retry:
    delay_s: float = 0.0
    at_s: float = 0.0


class Dispatcher:
    """Sends messages to the receivers of one cluster. Its methods block and must all be called from one thread."""

    def __init__(self, records: AlertRecords, receivers: Sequence[Receiver], config: NotifySection) -> None:
        self._records, self._receivers, self._config = records, receivers, config
        self._retries = {receiver.name: _Retry() for receiver in receivers}

    def send_due(self, source: AlertSource, now_s: float) -> int:
        """Sends all messages that are due. Returns the number of messages that were delivered."""
        silenced = {silence.name for silence in self._records.silences(now_s)}
        alerts = self._records.alerts(source)
        return sum(self._send(receiver, alerts, silenced, now_s) for receiver in self._receivers)

    def _send(self, receiver: Receiver, alerts: list[Alert], silenced: Collection[str], now_s: float) -> bool:
        retry = self._retries[receiver.name]
        due = due_alerts(alerts, self._records.told(receiver.name), silenced, self._config, now_s)
        if not due or now_s < retry.at_s <= now_s + 1.5 * _LAST_RETRY_S:
            return False
        if self._records.sent_between(receiver.name, now_s - _HOUR_S, now_s) >= self._config.most_per_h:
            return False
        try:
            receiver.send(due)
        except (RaytideError, ValueError) as error:  # ValueError: smtplib sends no password that is not ASCII
            why = str(error) if isinstance(error, RaytideError) else type(error).__name__  # may quote the password
            retry.delay_s = min(2 * retry.delay_s or _FIRST_RETRY_S, _LAST_RETRY_S)
            retry.at_s = now_s + retry.delay_s * random.uniform(0.5, 1.5)  # jitter
            log.warning("a message was not delivered", extra={"receiver": receiver.name, "error": why})
            return False
        retry.delay_s = retry.at_s = 0.0
        self._records.note_sent(receiver.name, due, now_s)
        return True
