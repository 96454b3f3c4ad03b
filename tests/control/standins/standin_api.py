"""An API that answers GET /health at the address in client.json."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    address = json.loads((Path(sys.argv[1]) / "client.json").read_text())["address"]
    ip, _, port = address.removeprefix("http://").rpartition(":")
    HTTPServer((ip, int(port)), Health).serve_forever()
