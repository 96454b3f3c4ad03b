"""Messages: a real SMTP server gets a mail, real HTTP servers their formats; grouped, limited and retried."""

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, Session
from hypothesis import given
from hypothesis import strategies as st
from tests.dashboards.alerts.alert_examples import NOW_S, firing, resolved

from raytide.core.errors import ClusterError, ConfigError
from raytide.core.telemetry.settings import NotifySection
from raytide.dashboards.alerts.notify.dispatch import Dispatcher, due_alerts
from raytide.dashboards.alerts.notify.receivers import receivers_of
from raytide.dashboards.alerts.records import AlertRecords, Silence
from raytide.dashboards.alerts.signing import SIGNATURE, post_signed, signature_of
from raytide.dashboards.alerts.states import Alert, Observed, advance


class Mailbox:
    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []

    async def handle_DATA(  # noqa: N802 # aiosmtpd's name
        self, server: Any, session: Session, envelope: Envelope
    ) -> str:
        assert isinstance(envelope.content, bytes)
        mail = message_from_bytes(envelope.content, policy=policy.default)
        assert isinstance(mail, EmailMessage)
        self.mails.append(mail)
        return "250 taken"


class Closing(Mailbox):
    """A server that takes mails, and then ends the connection in its own way."""

    async def handle_QUIT(  # noqa: N802 # aiosmtpd's name
        self, server: Any, session: Session, envelope: Envelope
    ) -> str:
        return "421 too busy for a farewell"


@contextmanager
def smtp(
    ssl_context: ssl.SSLContext | None = None, box: Mailbox | None = None, **options: Any
) -> Iterator[tuple[Mailbox, int]]:
    box, loop = box or Mailbox(), asyncio.new_event_loop()
    listening = socket.create_server(("127.0.0.1", 0))
    made = loop.create_server(lambda: SMTP(box, loop=loop, **options), sock=listening, ssl=ssl_context)
    server = loop.run_until_complete(made)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield box, listening.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def http(status: int = 200) -> Iterator[tuple[list[tuple[dict[str, str], bytes]], str]]:
    got: list[tuple[dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((dict(self.headers), body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield got, f"http://127.0.0.1:{server.server_port}/hook"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def config(**fields: Any) -> NotifySection:
    return NotifySection.parse({"group_wait_s": 0, **fields}, where="notify")


def mail_to(port: int, **fields: Any) -> NotifySection:
    email = {"host": "127.0.0.1", "port": port, "tls": "off", "sender": "raytide@here.org", "to": ["ops@here.org"]}
    return config(email={**email, **fields})


def send(section: NotifySection, path: Path, *alerts: Alert, environment: dict[str, str] | None = None) -> int:
    records = AlertRecords(path / "a")
    records.save(alerts, NOW_S)
    return Dispatcher(records, receivers_of(section, "local", environment or {}), section).send_due("raytide", NOW_S)


def test_a_mail_arrives_at_a_local_smtp_server(tmp_path: Path) -> None:
    with smtp() as (box, port):
        assert send(mail_to(port), tmp_path, firing(), firing("SlowLine", node="n\r\nBcc: x@y")) == 1
        send(mail_to(port), tmp_path, resolved(firing(), NOW_S + 60))
    first, second = box.mails
    assert first["To"] == "ops@here.org"
    assert first["Bcc"] is None
    assert first["Subject"].startswith("[local] 2 firing: ")
    assert "node=node-1" in first.get_content()
    assert "https://example.org/runbook" in first.get_content()
    assert second["Subject"] == "[local] 1 resolved: NodeSick"


def test_a_mail_that_was_taken_is_not_sent_again_whatever_the_farewell(tmp_path: Path) -> None:
    with smtp(box=Closing()) as (box, port):
        assert send(mail_to(port), tmp_path, firing()) == 1
    assert len(box.mails) == 1


@pytest.mark.parametrize("tls", ["starttls", "implicit"])
def test_a_server_whose_certificate_is_unknown_gets_neither_mail_nor_password(tmp_path: Path, tls: str) -> None:
    from tests.dashboards.alerts.self_signed import server_context

    context = server_context(tmp_path)
    is_implicit = tls == "implicit"
    options: dict[str, Any] = {"ssl_context": context} if is_implicit else {"tls_context": context}
    seen: list[object] = []

    def authenticator(*args: object) -> AuthResult:
        seen.append(args)
        return AuthResult(success=True)

    fields = {"tls": tls, "user": "ana", "password_env": "SMTP_PASSWORD"}
    with smtp(authenticator=authenticator, **options) as (box, port):
        sent = send(mail_to(port, **fields), tmp_path, firing(), environment={"SMTP_PASSWORD": "s3cret"})
    assert (sent, box.mails, seen) == (0, [], [])


def test_a_password_comes_from_a_private_file_only(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    (tmp_path / "password").chmod(0o644)
    section = mail_to(25, tls="starttls", user="ana", password_file=str(tmp_path / "password"))
    (receiver,) = receivers_of(section, "local", {})
    with pytest.raises(ConfigError, match="read by others"):
        receiver._password()  # type: ignore[attr-defined]
    (tmp_path / "password").chmod(0o600)
    assert receiver._password() == "s3cret"  # type: ignore[attr-defined]


def test_slack_pagerduty_and_webhooks_get_their_formats(tmp_path: Path) -> None:
    with http() as (got, url):
        section = config(
            slack={"url_env": "SLACK"},
            pagerduty={"routing_key_env": "PD", "url": url},
            webhook={"url": url, "secret_env": "HOOK"},
        )
        environment = {"SLACK": url, "PD": "r0uting", "HOOK": "k3y"}
        alert = firing(node="<!channel>")
        assert send(section, tmp_path, alert, environment=environment) == 3
        send(section, tmp_path, resolved(alert, NOW_S + 60), environment=environment)
    slack, page, hook, _, page_over, _ = (json.loads(body) for _, body in got)
    assert slack["text"] == "[local] 1 firing: NodeSick"
    assert "&lt;!channel&gt;" in slack["attachments"][0]["text"]
    assert (page["event_action"], page["routing_key"], page["payload"]["severity"]) == (
        "trigger",
        "r0uting",
        "critical",
    )
    assert page["links"] == [{"href": "https://example.org/runbook", "text": "what to do"}]
    assert (page_over["event_action"], page_over["dedup_key"]) == ("resolve", page["dedup_key"])
    assert (hook["version"], hook["status"], hook["alerts"][0]["labels"]["alertname"]) == ("4", "firing", "NodeSick")
    headers, body = got[2]
    assert headers[SIGNATURE] == signature_of(body, "k3y")


def test_an_answer_without_end_holds_nothing_up() -> None:
    left = threading.Event()

    class Endless(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b".")
                    if left.wait(0.1):
                        break

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Endless)
    serving = threading.Thread(target=server.handle_request)
    serving.start()
    said: list[str] = []
    url = f"http://127.0.0.1:{server.server_port}/"
    posting = threading.Thread(target=lambda: said.append(post_signed(url, {}, "", "", 20.0)))
    posting.start()
    posting.join(5.0)
    try:
        assert said == ["127.0.0.1 answered 200"]
    finally:
        left.set()
        posting.join()
        serving.join()
        server.server_close()


def test_what_is_not_delivered_is_sent_again_with_jitter_and_nothing_is_lost(tmp_path: Path) -> None:
    records = AlertRecords(tmp_path / "a")
    records.save([firing()], NOW_S)
    section = config(webhook={"url": "http://127.0.0.1:9/"})

    class Broken:
        name = "broken"
        sent: Sequence[Alert] = ()
        tries = 0

        def send(self, alerts: Sequence[Alert]) -> None:
            self.tries += 1
            if self.tries < 3:
                raise ClusterError("nobody is there.")
            self.sent = alerts

    broken = Broken()
    dispatcher = Dispatcher(records, [broken], section)
    tries = []
    for second in range(60):
        dispatcher.send_due("raytide", NOW_S + second)
        tries.append(broken.tries)
    assert tries[-1] == 3
    assert tries[1] == 1  # it waits before it tries again
    assert [alert.name for alert in broken.sent] == ["NodeSick"]


def test_the_rate_limit_holds_messages_back_and_the_next_has_all(tmp_path: Path) -> None:
    with http() as (got, url):
        section = config(webhook={"url": url}, most_per_h=2)
        records = AlertRecords(tmp_path / "a")
        dispatcher = Dispatcher(records, receivers_of(section, "local", {}), section)
        for number in range(6):
            records.save([firing(f"Alert{number}", NOW_S + number)], NOW_S + number)
            dispatcher.send_due("raytide", NOW_S + number)
        assert len(got) == 2
        dispatcher.send_due("raytide", NOW_S + 3700)
    assert len(json.loads(got[2][1])["alerts"]) == 4


def test_alerts_wait_for_others_and_repeat_after_a_while(tmp_path: Path) -> None:
    section = config(group_wait_s=30, repeat_s=3600)
    alerts = [firing(at_s=NOW_S), firing("Other", NOW_S + 20)]
    assert due_alerts(alerts, {}, (), section, NOW_S + 29) == []
    assert due_alerts(alerts, {}, (), section, NOW_S + 30) == alerts
    told = {(a.source, a.id): (a.episode, str(a.state), NOW_S + 30) for a in alerts}
    assert due_alerts(alerts, told, (), section, NOW_S + 3629) == []
    assert due_alerts(alerts, told, (), section, NOW_S + 3630) == alerts
    assert due_alerts(alerts, {}, ("Other",), section, NOW_S + 60) == alerts[:1]
    AlertRecords(tmp_path / "a").silence(Silence("x", NOW_S, "ana", NOW_S))


@given(st.lists(st.sampled_from(["fire", "end", "look"]), max_size=30))
def test_a_receiver_hears_of_an_end_only_after_the_begin(steps: list[str]) -> None:
    section, alert = config(), firing()
    told: dict[tuple[str, str], tuple[str, str, float]] = {}
    heard: list[tuple[str, str]] = []
    current: Alert | None = None
    for number, step in enumerate(steps):
        at_s = NOW_S + number
        if step == "fire" and (current is None or current.state == "resolved"):
            current = firing(at_s=at_s)
        elif step == "end" and current is not None and current.state == "firing":
            current = resolved(current, at_s)
        elif step == "look" and current is not None:
            for due in due_alerts([current], told, (), section, at_s):
                told[due.source, due.id] = (due.episode, str(due.state), at_s)
                heard.append((due.episode, str(due.state)))
    for episode, state in heard:
        assert heard.count((episode, state)) == 1
        if state == "resolved":
            assert heard.index((episode, "firing")) < heard.index((episode, "resolved"))
    assert alert.id == firing().id


def test_a_password_that_cannot_be_sent_silences_no_other_receiver(tmp_path: Path) -> None:
    records, heard = AlertRecords(tmp_path / "a"), list[Alert]()
    records.save([firing()], NOW_S)

    class Mail:
        name = "email"

        def send(self, alerts: Sequence[Alert]) -> None:
            "pässwort".encode("ascii")  # as smtplib does

    class Chat:
        name = "slack"

        def send(self, alerts: Sequence[Alert]) -> None:
            heard.extend(alerts)

    assert Dispatcher(records, [Mail(), Chat()], config()).send_due("raytide", NOW_S) == 1
    assert [alert.name for alert in heard] == ["NodeSick"]


def test_the_end_is_told_although_the_condition_flickers_meanwhile(tmp_path: Path) -> None:
    records, section = AlertRecords(tmp_path / "a"), config(group_wait_s=30)
    heard: list[str] = []

    class Pager:
        name = "pager"

        def send(self, alerts: Sequence[Alert]) -> None:
            heard.extend(str(alert.state) for alert in alerts)

    dispatcher = Dispatcher(records, [Pager()], section)
    node = (("node", "node-1"),)
    for step, holds in enumerate([True] * 8 + [False, True] + [False] * 8):
        at_s = NOW_S + 15 * step
        known = {alert.id: alert for alert in records.alerts("raytide")}
        records.save(advance(known, [Observed("NodeSick", "critical", 60.0, {node: 1.0} if holds else {})], at_s), at_s)
        dispatcher.send_due("raytide", at_s)
    assert heard == ["firing", "resolved"]


def test_the_next_episode_of_an_alert_is_no_second_incident() -> None:
    (pager,) = receivers_of(config(pagerduty={"routing_key_env": "PD"}), "local", {"PD": "r0uting"})
    first, again = (pager._event(firing(at_s=at_s)) for at_s in (NOW_S, NOW_S + 60))  # type: ignore[attr-defined]
    assert first["dedup_key"] == again["dedup_key"]


def test_an_alert_of_before_the_clock_was_set_back_is_sent() -> None:
    alert = firing(at_s=NOW_S + 7200)
    assert due_alerts([alert], {}, (), NotifySection(), NOW_S + 60) == [alert]
