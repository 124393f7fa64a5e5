"""Serves the newest numbers of a run to Prometheus, at http://127.0.0.1:PORT/metrics (log.prometheus_port).

The address is the host's own. Another host reaches it through a tunnel or an agent of this host.
"""

import re
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import groupby
from threading import Thread
from typing import TYPE_CHECKING, Any

from megapar.observe.sinks.base import Line, RunInfo, scalars

if TYPE_CHECKING:
    import prometheus_client

_HOST = "127.0.0.1"
_PATIENCE_SECONDS = 2.0  # for a reader that connects and says nothing
_NAMES = {"loss": "training_loss", "lr": "learning_rate"}  # other keys are names as they are
# A part of these keys is a label: megapar_comm_bytes{axis="tp"}.
_LABELS = {"comm_bytes": "axis", "losses": "name"}
_HELP = {
    "training_loss": "Mean loss of a target token of the newest step, in nats",
    "tokens_per_second": "Positions of the newest step a second, of all ranks",
    "mfu": "Model FLOPs a second, as a share of the peak",
    "grad_norm": "Norm of the gradient before clipping",
    "step": "Completed steps",
    "failed_saves": "Saves to the run folder that have failed since the newest one that did not",
    "last_step_timestamp_seconds": "When the newest step was reported, in seconds since 1970",
}


class Prometheus:
    """A sink that keeps the newest value of each number, and answers GET /metrics."""

    name = "Prometheus"

    def __init__(self, run: RunInfo, port: int):
        self._port = port
        self._values: dict[tuple[str, str, str], float] = {("train_steps", "", ""): run.steps}
        self._server: HTTPServer | None = None

    def open(self) -> str:
        """Listen. Raises OSError if the port is taken, and ImportError without prometheus_client."""
        import prometheus_client  # noqa: F401  # here, not at the first request, whose error nobody would see

        sink = self

        class Handler(_Handler):
            text = staticmethod(sink.text)

        try:
            # One request at a time: a crowd of readers must not become a crowd of threads beside training.
            self._server = _Server((_HOST, self._port), Handler)
        except OSError as error:
            raise OSError(f"log.prometheus_port={self._port}: {error.strerror}") from error
        Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        return f"http://{_HOST}:{self._server.server_address[1]}/metrics"

    def write(self, lines: Sequence[Line]) -> None:
        """Keep the numbers of lines."""
        new: dict[tuple[str, str, str], float] = {}
        for line in lines:
            for key, value in scalars(line):
                name, _, part = key.partition("/")
                gauge = re.sub(r"[^a-zA-Z0-9_]", "_", _NAMES.get(name, name))
                new[gauge, _LABELS.get(name, "set") if part else "", part] = value
            new["step", "", ""] = line["step"]
        new["last_step_timestamp_seconds", "", ""] = time.time()
        self._values = {**self._values, **new}  # a new table: a reader may be going through the old one

    def text(self) -> bytes:
        """Return the numbers in Prometheus' text format, version 0.0.4."""
        import prometheus_client  # here: a run without log.prometheus_port needs none of it

        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        return prometheus_client.generate_latest(registry)

    def collect(self) -> "Iterator[prometheus_client.Metric]":
        """Yield a gauge for each name: what a registry of prometheus_client asks for."""
        import prometheus_client

        for name, values in groupby(sorted(self._values.items()), key=lambda item: item[0][0]):
            full = f"megapar_{name}"
            gauge = prometheus_client.Metric(full, _HELP.get(name, name.replace("_", " ")), "gauge")
            for (_, label, part), value in values:
                gauge.add_sample(full, {label: part} if part else {}, value)
            yield gauge

    def close(self) -> None:
        """Stop to listen."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def abandon(self) -> None:
        """Nothing holds up the end of the process."""


class _Server(HTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a reader that goes away is no error of the run."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics to programs of this host."""

    timeout = _PATIENCE_SECONDS
    server_version = "megapar"
    sys_version = ""

    @staticmethod
    def text() -> bytes:
        """Return the body of the answer."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer a request."""
        # A page in a browser of this host can send requests here under a name of its own (DNS rebinding).
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        if host not in (_HOST, "localhost"):
            self.send_error(403, "the name of the host is 127.0.0.1 or localhost")
        elif self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "the numbers are at /metrics")
        else:
            body = self.text()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the console is the run's."""
