"""Serves the page of runs on this host, from their folders alone.

The address has a secret, because every user of the host reaches its ports.
"""

import json
import re
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megapar.base.errors import ConfigError, reason_of
from megapar.system.say import tell
from megapar_tools.dashboard.page import POINTS, html
from megapar_tools.dashboard.record import RunFolder

HOST = "127.0.0.1"
_MOST_POINTS = 20_000
_PATIENCE_SECONDS = 10.0  # for a request, and for an answer to be taken
_MOST_WAITING = 64  # connections without a request
_DETAIL_SECONDS = 10.0  # how old details may be


class Dashboard(ThreadingHTTPServer):
    """Answers GET /SECRET/ with the page, and GET /SECRET/data?points=N&steps=A-B with its newest data.

    Port 0 takes a free one. Raises ConfigError if the port is taken.
    """

    daemon_threads = True

    def __init__(self, run_dirs: Sequence[Path], port: int):
        self._runs = [RunFolder(path) for path in run_dirs]
        self._lock = Lock()
        self._waiting: dict[socket.socket, float] = {}  # connections whose request is not there yet, and until when
        self.secret = secrets.token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: {reason_of(error)}; --port 0 takes a free one") from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/{self.secret}/"

    def data(self, points: int, steps: tuple[int, int] | None) -> dict[str, Any]:
        """What the page shows. Details are made anew every few seconds."""
        details = [run.details(_DETAIL_SECONDS) for run in self._runs]
        return {"runs": [run.record(time.time(), points, steps) for run in self._runs], "details": details}

    def wait_for(self, connection: socket.socket) -> None:
        """Note that a connection owes a request from now on. Of too many, the one that has waited longest is cut."""
        with self._lock:
            if len(self._waiting) >= _MOST_WAITING:
                _cut(self._waiting, min(self._waiting, key=self._waiting.__getitem__))
            self._waiting[connection] = time.monotonic() + _PATIENCE_SECONDS

    def came(self, connection: socket.socket) -> None:
        """Note that the request is there, or that the connection has ended."""
        with self._lock:
            self._waiting.pop(connection, None)

    def service_actions(self) -> None:
        """Cut connections whose requests are not there in time; the server's loop calls this twice a second."""
        with self._lock:
            for connection in [one for one, end in self._waiting.items() if time.monotonic() > end]:
                _cut(self._waiting, connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell an error of ours in one line. A browser that has left is none."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            tell(f"a request has failed: {type(error).__name__}: {error}")


def _cut(waiting: dict[socket.socket, float], connection: socket.socket) -> None:
    """End a connection. Its thread reads the end of the request, and ends."""
    del waiting[connection]
    with suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    timeout = _PATIENCE_SECONDS
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        # The time-out above is for each letter of a request; this one is for all of it.
        self.server.wait_for(self.connection)
        try:
            super().handle_one_request()
        finally:
            self.server.came(self.connection)

    def do_GET(self) -> None:
        self.server.came(self.connection)
        address = urlsplit(self.path)
        root = f"/{self.server.secret}/"
        if address.path == root:
            found = self.server.data(POINTS, None)
            self._answer(200, "text/html", html("megapar: runs", found["runs"], found["details"], live=True))
        elif address.path == f"{root}data":
            asked = parse_qs(address.query)
            points = re.fullmatch(r"\d{1,5}", asked.get("points", [""])[0])
            steps = re.fullmatch(r"(\d{1,15})-(\d{1,15})", asked.get("steps", [""])[0])
            found = self.server.data(
                max(16, min(int(points[0]), _MOST_POINTS)) if points else POINTS,
                (int(steps[1]), int(steps[2])) if steps else None,
            )
            self._answer(200, "application/json", json.dumps(found, allow_nan=False))
        else:
            self._answer(404, "text/plain", "The address is the one that megapar dashboard has printed.\n")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if code == 404:  # whoever does not know the secret gets one request of a connection
            self.send_header("Connection", "close")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each poll would hide the address."""
