"""The sections of cluster.yaml for monitoring and tracing.

`metadata.raytide.monitoring` configures the history, the alerts with their actions and receivers, and the probes.
`metadata.raytide.tracing` configures the collector of traces and the share of requests that are traced.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from raytide.core.config import Config

AlertName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,99}$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,199}$")]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+[^\s@#]*$", max_length=2048)]
Address = Annotated[str, Field(pattern=r"^[^\s@<>,;\"]+@[^\s@<>,;\"]+$", max_length=254)]
Severity = Literal["info", "warning", "critical"]
ActionKind = Literal[
    "restart_replica", "replace_node", "quarantine_node", "rollback", "pause_budget", "command", "webhook"
]


class AlertOverride(Config):
    """Settings that replace the settings of one alert rule."""

    bound: float | None = None
    """The value from which the alert fires, in place of the rule's own."""
    for_s: float | None = Field(default=None, ge=0, le=7 * 86_400)
    """The seconds for which the condition must hold before the alert fires."""
    off: bool = False


class AlertAction(Config):
    """An action that runs when an alert fires."""

    alert: AlertName
    """The name of the alert. The field is not called `on`, because YAML reads that key as true."""
    do: ActionKind
    cooldown_s: float = Field(default=600.0, ge=0, le=7 * 86_400)
    """The seconds after an action of this entry on an object in which the entry does nothing more to that object."""
    most_per_h: int = Field(default=4, ge=1, le=1000)
    """The most actions of this entry in an hour, on all objects."""
    dry_run: bool = False
    """True to only record the action that would run."""
    command: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = Field(default=(), max_length=64)
    """For `command`: the program and its arguments, run without a shell. It reads the alert as JSON from its input."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """The timeout of a `command` or `webhook`, in seconds."""
    url: Url | None = None
    """For `webhook`: the address to which the alert is sent as JSON."""
    secret_env: VariableName | None = None
    """For `webhook`: the name of the variable with the key that signs the body (HMAC-SHA256, header
    `X-Raytide-Signature`).
    """

    @model_validator(mode="after")
    def _fields_of_kind(self) -> AlertAction:
        if bool(self.command) != (self.do == "command"):
            raise ValueError("`command` belongs to `do: command`, and only to that")
        if (self.url is not None) != (self.do == "webhook"):
            raise ValueError("`url` belongs to `do: webhook`, and only to that")
        return self


class EmailSection(Config):
    """A receiver that gets alerts by mail over SMTP."""

    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_-]+$", max_length=253)]
    port: int = Field(default=587, ge=1, le=65_535)
    tls: Literal["starttls", "implicit", "off"] = "starttls"
    """`implicit` is TLS from the first byte, usually on port 465. With `off` nothing is encrypted, and no password is
    sent."""
    sender: Address
    to: tuple[Address, ...] = Field(min_length=1, max_length=50)
    user: str = ""
    password_env: VariableName | None = None
    """The name of the environment variable with the password, where the cluster is started."""
    password_file: str = ""
    """A file with the password, which only raytide's user can read; in place of `password_env`."""

    @model_validator(mode="after")
    def _password(self) -> EmailSection:
        if self.user and not (self.password_env or self.password_file):
            raise ValueError("`user` needs `password_env` or `password_file`")
        if self.user and self.tls == "off":
            raise ValueError("a password is not sent without TLS")
        return self


class UrlFromEnvironment(Config):
    """A receiver whose address or key is secret. cluster.yaml only names the environment variable with the secret."""

    url_env: VariableName
    """The name of the variable with the receiver's URL."""


class PagerDutySection(Config):
    routing_key_env: VariableName
    """The name of the variable with the integration's key (Events API v2)."""
    url: Url = "https://events.pagerduty.com/v2/enqueue"


class WebhookSection(Config):
    """A receiver that gets alerts as JSON in Alertmanager's format (version 4)."""

    url: Url
    secret_env: VariableName | None = None
    """The name of the variable with the key that signs the body (HMAC-SHA256, header `X-Raytide-Signature`)."""


class NotifySection(Config):
    """The receivers of alerts. Alerts that fire within `group_wait_s` of each other are sent as one message."""

    email: EmailSection | None = None
    slack: UrlFromEnvironment | None = None
    """Slack's incoming webhook, or a receiver of the same JSON."""
    pagerduty: PagerDutySection | None = None
    webhook: WebhookSection | None = None
    least_severity: Severity = "warning"
    group_wait_s: float = Field(default=30.0, ge=0, le=3600)
    repeat_s: float = Field(default=4 * 3600.0, ge=60, le=7 * 86_400)
    """The seconds after which an alert that still fires is sent again."""
    most_per_h: int = Field(default=30, ge=1, le=1000)
    """The most messages in an hour to each receiver. Alerts above this limit are added to the next message."""


class ProbeSection(Config):
    """A request with a known answer. It is sent to an endpoint at regular intervals, on the same path as users'
    requests."""

    endpoint: Annotated[str, Field(min_length=1, max_length=63)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,63}$")] = "probe"
    prompt: Annotated[str, Field(min_length=1, max_length=10_000)]
    expect: str = ""
    """A regular expression that the answer must contain; empty if any answer is right."""
    api: Literal["chat", "completions"] = "chat"
    max_tokens: int = Field(default=16, ge=1, le=4096)
    every_s: float = Field(default=60.0, ge=5, le=86_400)
    timeout_s: float = Field(default=30.0, gt=0, le=600)

    @model_validator(mode="after")
    def _expression(self) -> ProbeSection:
        try:
            re.compile(self.expect)
        except re.error as error:
            raise ValueError(f"`expect` is no regular expression: {error}") from None
        return self


class MonitoringSection(Config):
    """The settings of the history, the alerts, their actions and receivers, and the probes."""

    history_days: float = Field(default=7.0, ge=0.1, le=400)
    history_mb: int = Field(default=256, ge=16, le=100_000)
    """The largest size of the history in MB; the oldest values are removed first."""
    scrape_s: float = Field(default=15.0, ge=1, le=300)
    alerts: dict[AlertName, AlertOverride] = Field(default_factory=dict)
    actions: tuple[AlertAction, ...] = Field(default=(), max_length=100)
    notify: NotifySection = NotifySection()
    probes: tuple[ProbeSection, ...] = Field(default=(), max_length=200)
    certificates: tuple[Url, ...] = Field(default=(), max_length=100)
    """Further https addresses whose certificates are watched, such as that of the proxy in front of the cluster."""
    probe_team: str = "default"
    """The team that pays for probes, where the gateway requires API keys."""

    @model_validator(mode="after")
    def _probes(self) -> MonitoringSection:
        names = [(probe.endpoint, probe.name) for probe in self.probes]
        if twice := sorted({f"{e}/{n}" for e, n in names if names.count((e, n)) > 1}):
            raise ValueError(f"two probes have the name {', '.join(twice)}: give each a `name` of its own")
        return self

    def secrets(self) -> frozenset[str]:
        """Returns the names of the environment variables that hold secrets of receivers and actions. Only the monitor
        needs these variables."""
        notify = self.notify
        named = {action.secret_env for action in self.actions}
        if notify.email is not None:
            named.add(notify.email.password_env)
        if notify.slack is not None:
            named.add(notify.slack.url_env)
        if notify.pagerduty is not None:
            named.add(notify.pagerduty.routing_key_env)
        if notify.webhook is not None:
            named.add(notify.webhook.secret_env)
        return frozenset(name for name in named if name)


class TracingSection(Config):
    """The settings for traces of requests and jobs. The traces are sent to a collector as OpenTelemetry's OTLP over
    HTTP. Tracing is off if no address is set."""

    otlp: Annotated[str, Field(pattern=r"^(https?://[^\s/@?#]+[^\s@?#]*)?$", max_length=2048)] = ""
    """The collector's base URL, such as `http://127.0.0.1:4318`; `/v1/traces` is added."""
    sample: float = Field(default=0.01, ge=0, le=1)
    """The share of requests that are traced, besides those whose client sends a sampled `traceparent`. Jobs are all
    traced."""
    most_per_s: float = Field(default=50.0, gt=0, le=10_000)
    """The most requests that each gateway process traces in a second, including those that clients ask to trace."""
    headers_env: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$", max_length=200)] = ""
    """The name of the variable with headers for the collector (`name=value,name=value`), where the cluster is
    started."""
