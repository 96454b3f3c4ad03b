"""The types of receivers: mail, Slack-compatible webhooks, PagerDuty, and webhooks in Alertmanager's format."""

from __future__ import annotations

import smtplib
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from raytide.core.bounds import printable
from raytide.core.errors import ClusterError, ConfigError
from raytide.core.telemetry.settings import (
    EmailSection,
    NotifySection,
    PagerDutySection,
    UrlFromEnvironment,
    WebhookSection,
)
from raytide.dashboards.alerts.payload import payload_of
from raytide.dashboards.alerts.signing import post_signed
from raytide.dashboards.alerts.states import Alert, AlertState

_TIMEOUT_S = 20.0
_COLORS = {"info": "#3a7bd5", "warning": "#d58e00", "critical": "#c62828"}
_OVER = "#2e7d32"
S = TypeVar("S")


class Receiver(Protocol):
    """A destination of messages about alerts."""

    @property
    def name(self) -> str: ...

    def send(self, alerts: Sequence[Alert]) -> None:
        """Delivers one message. Raises a RaytideError if it was not delivered."""


def receivers_of(config: NotifySection, cluster: str, environment: Mapping[str, str]) -> list[Receiver]:
    """Returns the receivers that the configuration lists."""
    found: list[Receiver] = []
    if config.email is not None:
        found.append(_Email(config.email, cluster, environment))
    if config.slack is not None:
        found.append(_Slack(config.slack, cluster, environment))
    if config.pagerduty is not None:
        found.append(_PagerDuty(config.pagerduty, cluster, environment))
    if config.webhook is not None:
        found.append(_Webhook(config.webhook, cluster, environment))
    return found


def title_of(alerts: Sequence[Alert], cluster: str) -> str:
    """Returns the title of a message, such as `[local] 2 firing, 1 resolved: GpuXidError, NodeLost`."""
    firing = sum(alert.state is AlertState.FIRING for alert in alerts)
    counts = [f"{count} {word}" for count, word in ((firing, "firing"), (len(alerts) - firing, "resolved")) if count]
    names = ", ".join(dict.fromkeys(alert.name for alert in alerts))
    return printable(f"[{cluster}] {', '.join(counts)}: {names}", 200).replace("\n", " ")


def _lines(alert: Alert) -> list[str]:
    when = datetime.fromtimestamp(alert.since_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    labels = ", ".join(f"{name}={value}" for name, value in alert.labels)
    lines = [f"{alert.state.upper()} {alert.name} ({alert.severity}) since {when}", f"  {alert.summary}"]
    lines += [f"  {labels}"] if labels else []
    lines += [f"  value: {alert.value:g}"] if alert.value is not None else []
    lines += [f"  what to do: {alert.page}"] if alert.page else []
    return [printable(line, 2000) for line in lines if line.strip()]


def email_of(alerts: Sequence[Alert], config: EmailSection, cluster: str) -> EmailMessage:
    message = EmailMessage()
    message["From"], message["To"] = config.sender, ", ".join(config.to)
    message["Subject"] = title_of(alerts, cluster)
    message["Date"], message["Message-ID"] = formatdate(), make_msgid(domain="raytide.invalid")
    message["Auto-Submitted"] = "auto-generated"
    text = "\n\n".join("\n".join(_lines(alert)) for alert in alerts)
    message.set_content(
        f"{text}\n\n`raytide alerts list` shows all; `raytide alerts silence NAME --for 2h` quiets one.\n"
    )
    return message


class _Configured(Generic[S]):
    def __init__(self, config: S, cluster: str, environment: Mapping[str, str]) -> None:
        self._config, self._cluster, self._environment = config, cluster, environment


class _Email(_Configured[EmailSection]):
    name = "email"

    def send(self, alerts: Sequence[Alert]) -> None:
        config = self._config
        message = email_of(alerts, config, self._cluster)
        try:
            smtp = self._connected()
            try:
                if config.tls == "starttls":
                    smtp.starttls(context=ssl.create_default_context())
                if config.user:
                    smtp.login(config.user, self._password())
                smtp.send_message(message)
            finally:
                with suppress(OSError, smtplib.SMTPException):
                    smtp.quit()  # the server has accepted or refused the mail by now
                smtp.close()
        except (OSError, smtplib.SMTPException) as error:
            code = f" ({error.smtp_code})" if isinstance(error, smtplib.SMTPResponseException) else ""
            raise ClusterError(f"{config.host}:{config.port} took no mail: {type(error).__name__}{code}.") from None

    def _connected(self) -> smtplib.SMTP:
        config = self._config
        if config.tls == "implicit":
            context = ssl.create_default_context()
            return smtplib.SMTP_SSL(config.host, config.port, timeout=_TIMEOUT_S, context=context)
        return smtplib.SMTP(config.host, config.port, timeout=_TIMEOUT_S)

    def _password(self) -> str:
        if self._config.password_env:
            return _secret(self._environment, self._config.password_env)
        path = Path(self._config.password_file).expanduser()
        try:
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"{path} can be read by others.", hint=f"Run `chmod 600 {path}`.")
            return path.read_text().strip()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.", hint="Check `password_file`.") from None


class _Slack(_Configured[UrlFromEnvironment]):
    name = "slack"

    def send(self, alerts: Sequence[Alert]) -> None:
        attachments = [
            {
                "color": _OVER if alert.state is AlertState.RESOLVED else _COLORS[alert.severity],
                "fallback": f"{alert.state}: {alert.name}",
                "text": _escaped("\n".join(_lines(alert))),
            }
            for alert in alerts
        ]
        message = {"text": _escaped(title_of(alerts, self._cluster)), "attachments": attachments}
        post_signed(_secret(self._environment, self._config.url_env), message, "", "", _TIMEOUT_S)


class _PagerDuty(_Configured[PagerDutySection]):
    name = "pagerduty"

    def send(self, alerts: Sequence[Alert]) -> None:
        """Sends an event for each alert. A repeated event changes nothing, because its `dedup_key` is the alert's
        episode.
        """
        for alert in alerts:
            post_signed(self._config.url, self._event(alert), "", "", _TIMEOUT_S)

    def _event(self, alert: Alert) -> dict[str, Any]:
        event: dict[str, Any] = {
            "routing_key": _secret(self._environment, self._config.routing_key_env),
            "event_action": "resolve" if alert.state is AlertState.RESOLVED else "trigger",
            "dedup_key": f"{self._cluster}-{alert.id}",  # not the episode: the next may begin before this end is told
            "client": "raytide",
            "payload": {
                "summary": printable(f"{alert.name}: {alert.summary}" if alert.summary else alert.name, 1024),
                "source": alert.label("node", "endpoint", "job", "team") or self._cluster,
                "severity": alert.severity,
                "timestamp": datetime.fromtimestamp(alert.fired_at_s or alert.since_s, UTC).isoformat(),
                "group": self._cluster,
                "class": alert.name,
                "custom_details": {**dict(alert.labels), "value": alert.value},
            },
        }
        if alert.page.startswith("https://"):
            event["links"] = [{"href": alert.page, "text": "what to do"}]
        return event


class _Webhook(_Configured[WebhookSection]):
    name = "webhook"

    def send(self, alerts: Sequence[Alert]) -> None:
        name = self._config.secret_env
        secret = _secret(self._environment, name) if name else ""
        post_signed(self._config.url, payload_of(alerts, "raytide"), secret, "", _TIMEOUT_S)


def _secret(environment: Mapping[str, str], name: str) -> str:
    if not (value := environment.get(name)):
        raise ConfigError(f"{name} is not set.", hint="Set it where the cluster is started, and start it again.")
    return value


def _escaped(text: str) -> str:
    """Escapes characters that Slack would read as a link or a mention."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
