"""A server that records events, and servers that are dead, slow or lying."""

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.fleet import free_ports
from tests.support.waiting import until


@dataclass
class Webhook:
    """A server: its port, the bodies of its requests, and when they came (Unix time)."""

    host: str = "127.0.0.1"
    port: int = 0
    bodies: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/services/s3cret"

    @property
    def events(self) -> list[str]:
        """The names of the events of JSON bodies, in the order of their arrival."""
        return [body["event"] for body in self.bodies]

    def wait(self, count: int, *, seconds: float = 20) -> list[Any]:
        """Wait for `count` requests and return their bodies."""
        until(lambda: len(self.bodies) >= count, seconds=seconds)
        return self.bodies


LYING = ("refused", "blackhole", "silent", "drip", "continue", "500", "redirect", "cut", "endless", "404")
"""The kinds of servers that take no event, or seem not to."""
_ANSWERS = {
    "ok": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "500": b"HTTP/1.1 500 Error\r\nContent-Length: 0\r\n\r\n",
    "404": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "redirect": b"HTTP/1.1 307 Again\r\nLocation: /services/again\r\nContent-Length: 0\r\n\r\n",
    "cut": b"HTTP/1.1 2",
}
_FLOODS = {"drip": b"H", "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 100, "endless": bytes(65536)}


@contextmanager
def serve_webhook(
    kind: str = "ok", *, address: str = "127.0.0.1", port: int = 0, host: str = ""
) -> Iterator[Webhook]:
    """Run a server of a kind, "ok" or one of LYING, at an address; `host` is the address in its URL.

    With `port` 0, the port is any free one.
    """
    hook = Webhook(host or address)
    if kind == "refused":
        hook.port = free_ports()
        yield hook
        return
    if kind == "blackhole":  # its queue is full, so that the kernel drops every SYN
        with socket.create_server((address, 0), backlog=0) as listener:
            hook.port = listener.getsockname()[1]
            fillers = [socket.socket() for _ in range(3)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex((address, hook.port))
            yield hook
            for filler in fillers:
                filler.close()
        return

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hook.times.append(time.time())
            hook.paths.append(self.path)
            hook.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.close_connection = True
            if kind in _ANSWERS:
                self.wfile.write(_ANSWERS[kind])
            elif kind == "silent":
                is_closed.wait(60)
            else:
                self._never_end()

        do_GET = do_POST

        def _never_end(self) -> None:
            head = b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n" * (kind == "endless")
            chunk = _FLOODS[kind]
            pause_s = 0.1 if kind == "drip" else 0.001
            try:
                self.wfile.write(head)
                while not is_closed.wait(pause_s):
                    self.wfile.write(chunk)
            except OSError:  # the client has closed the connection
                pass

        def log_message(self, *_: object) -> None:
            pass

    is_closed = threading.Event()
    with http.server.ThreadingHTTPServer((address, port), Handler) as server:
        server.daemon_threads = True
        hook.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hook
        finally:
            is_closed.set()
            server.shutdown()
