"""An HTTP server with two pages: `/metrics` in the text format of Prometheus, and `/health`.

It has a daemon thread of its own, not the watchdog's: a client that reads slowly must not delay statuses and verdicts, and a
job of one process has no watchdog. It computes nothing: the texts come from functions that read what is known on this rank.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Metric", "MetricsServer", "Values", "address_of", "exposition"]

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_SECONDS = 10.0
_POLL_SECONDS = 0.1
"""How often the thread looks whether it must end."""

Values = Sequence[tuple[Mapping[str, str], float]]
"""Labels and value."""
Metric = tuple[str, str, Values]
"""Help, kind ("gauge" or "counter"), and values; none where nothing is known yet."""


def address_of(port: int | str) -> tuple[str, int]:
    """(address to listen at, port): this machine alone for 9400, any address of it for "0.0.0.0:9400"."""
    if isinstance(port, int):
        return "127.0.0.1", port
    host, _, number = port.rpartition(":")
    return host.strip("[]"), int(number)


def exposition(metrics: Mapping[str, Metric]) -> str:
    """`metrics`, by name, in the text format 0.0.4 of Prometheus. Those without a value are left out."""
    lines = []
    for name, (help, kind, values) in metrics.items():
        if values:
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
        for labels, value in values:
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class MetricsServer:
    """Serves from its creation to `close()`."""

    def __init__(self, port: int | str, metrics: Callable[[], str], verdict: Callable[[], str]) -> None:
        """`port`: see `address_of`. `verdict`: what is wrong with the job, for `/health`; "" if nothing is.

        Raises `OSError` if the port is in use or the address is not of this machine.
        """

        class Handler(BaseHTTPRequestHandler):
            """Answers GET."""

            timeout = _CLIENT_SECONDS

            def do_GET(self) -> None:
                """One of the two pages."""
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, metrics())
                elif path == "/health":
                    wrong = verdict()
                    self._answer(503 if wrong else 200, f"{wrong or 'ok'}\n")
                else:
                    self._answer(404, "there are /metrics and /health\n")

            def _answer(self, code: int, text: str) -> None:
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", _TEXT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: a line per request would bury the log of the training."""

        host, number = address_of(port)
        self._server = (_Server6 if ":" in host else _Server)((host, number), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="hf_dist metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the port. Local."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        """Without the look-up of the machine's name that http.server makes, which may wait for a name server."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a client that leaves in the middle is no error of the training."""


class _Server6(_Server):
    address_family = socket.AF_INET6
