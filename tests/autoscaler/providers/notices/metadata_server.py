"""The metadata services of AWS (IMDSv2), GCP and Azure for one machine, on a port of this one.

As strict as the real ones: without a session's token, or without the header that says that no proxy asks, nothing is
told.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

NAME = "vm-7"


class MetadataServer:
    def __init__(self) -> None:
        self.pages: dict[str, str] = {
            "/computeMetadata/v1/instance/preempted": "FALSE",
            "/computeMetadata/v1/instance/maintenance-event": "NONE",
            "/metadata/instance/compute/name": NAME,
            "/metadata/scheduledevents": json.dumps({"DocumentIncarnation": 1, "Events": []}),
        }
        self.tokens: list[str] = []
        """AWS's, those that still count."""
        self.sessions = 0
        self.fail_next: list[int] = []
        """Statuses of the next answers, whatever is asked."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    def interrupt(self, at: str = "2026-11-21T17:02:00Z") -> None:
        action = {"action": "terminate", "time": at}
        self.pages["/latest/meta-data/spot/instance-action"] = json.dumps(action)

    def recommend_rebalance(self, at: str = "2026-11-21T17:00:00Z") -> None:
        self.pages["/latest/meta-data/events/recommendations/rebalance"] = json.dumps({"noticeTime": at})

    def schedule(self, kind: str, not_before: str, *names: str) -> None:
        event = {"EventId": "1", "EventType": kind, "NotBefore": not_before, "Resources": list(names)}
        self.pages["/metadata/scheduledevents"] = json.dumps({"DocumentIncarnation": 2, "Events": [event]})


def _handler(service: MetadataServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            if self.path != "/latest/api/token" or "X-aws-ec2-metadata-token-ttl-seconds" not in self.headers:
                self._send(400, "")
                return
            service.sessions += 1
            service.tokens.append(f"token-{service.sessions}")
            self._send(200, service.tokens[-1])

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if service.fail_next:
                self._send(service.fail_next.pop(0), "")
            elif path.startswith("/latest/") and self.headers.get("X-aws-ec2-metadata-token") not in service.tokens:
                self._send(401, "")
            elif path.startswith("/computeMetadata/") and self.headers.get("Metadata-Flavor") != "Google":
                self._send(403, "")
            elif path.startswith("/metadata/") and self.headers.get("Metadata") != "true":
                self._send(400, "")
            elif path in service.pages:
                self._send(200, service.pages[path])
            else:
                self._send(404, "")

        def _send(self, status: int, body: str) -> None:
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
