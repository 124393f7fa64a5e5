"""Serves the page of runs on this host, from their folders alone.

The address has a secret, because every user of the host reaches its ports.
"""

import json
import re
import secrets
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megapar.dashboard.page import POINTS, html
from megapar.dashboard.record import RunFolder
from megapar.errors import ConfigError, reason_of

HOST = "127.0.0.1"
_MOST_POINTS = 20_000
_PATIENCE_SECONDS = 10.0  # for a browser that connects and says nothing
_DETAIL_SECONDS = 10.0  # how old details may be


class Dashboard(ThreadingHTTPServer):
    """Answers GET /SECRET/ with the page, and GET /SECRET/data?points=N&steps=A-B with its newest data.

    Port 0 takes a free one. Raises ConfigError if the port is taken.
    """

    daemon_threads = True

    def __init__(self, run_dirs: Sequence[Path], port: int):
        self._runs = [RunFolder(path) for path in run_dirs]
        self._lock = Lock()  # curves are read further by one request at a time
        self._details: tuple[float, list[dict[str, Any]]] = (-_DETAIL_SECONDS, [])
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
        with self._lock:
            if time.monotonic() - self._details[0] > _DETAIL_SECONDS:
                self._details = time.monotonic(), [run.details() for run in self._runs]
            return {"runs": [run.record(time.time(), points, steps) for run in self._runs], "details": self._details[1]}


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    timeout = _PATIENCE_SECONDS
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
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
            self._answer(404, "text/plain", "The address is the one that dashboard.py has printed.\n")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each poll would hide the address."""
