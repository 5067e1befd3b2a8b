"""HTTP for the endpoint and for the nodes: connections that carry several requests, as those of AWS do.

werkzeug's own handler closes each connection after one request.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from werkzeug.exceptions import InternalServerError
from werkzeug.serving import WSGIRequestHandler

IDLE_S = 20.0  # so long a connection stays open without a request
DRAINED = 1 << 20  # so much of a body is read at once that nobody asked for


class Body:
    """The body of a request, which ends with it and not with the connection. `left`: bytes not yet read."""

    def __init__(self, source: io.BufferedIOBase, size: int) -> None:
        self._source = source
        self.left = size

    def read(self, size: int = -1) -> bytes:
        """Return at most so many bytes, b"" at the end."""
        return self._count(self._source.read(self._most(size)))

    def readline(self, size: int = -1) -> bytes:
        """Return a line, or as much of it as there is room for."""
        return self._count(self._source.readline(self._most(size)))

    def _most(self, size: int) -> int:
        return self.left if size < 0 else min(size, self.left)

    def _count(self, data: bytes) -> bytes:
        self.left -= len(data)
        return data


class Handler(WSGIRequestHandler):
    """One connection. It is closed where a body or a reply did not come to its end."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body of a small reply are one packet
    disable_nagle_algorithm = True

    def run_wsgi(self) -> None:
        """Answer one request."""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.wfile.flush()
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal():
            self.send_error(400)
            return
        environ = self.make_environ()
        body: Any = environ["wsgi.input"]
        is_chunked = "wsgi.input_terminated" in environ
        if not is_chunked:
            body = environ["wsgi.input"] = Body(self.rfile, int(length))
        try:
            is_whole = self._answer(environ)
            while body.read(DRAINED):  # who is refused early sees the reply once all was taken
                pass
        except ConnectionError:
            is_whole = False
        ends = is_chunked or not is_whole or body.left > 0
        self.close_connection = self.close_connection or ends or not self._is_asked_again()

    def _answer(self, environ: dict[str, Any]) -> bool:
        """Send the reply, and return whether it is as long as its head says. Raises ConnectionError."""
        try:
            return self._send(environ, self.server.app)
        except ConnectionError:
            raise
        except Exception:
            traceback.print_exc()
            return self._send(environ, InternalServerError()) and False

    def _send(self, environ: dict[str, Any], application: Any) -> bool:
        head: list[Any] = []
        parts: Iterable[bytes] = application(environ, lambda *given: head.extend(given))
        try:
            status, headers = head[:2]
            code, _, reason = status.partition(" ")
            self.send_response(int(code), reason)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            left = int(dict(headers).get("Content-Length", 0)) if self.command != "HEAD" else 0
            for data in parts:
                self.wfile.write(data)
                left -= len(data)
            self.wfile.flush()
            return left == 0
        finally:
            getattr(parts, "close", lambda: None)()

    def _is_asked_again(self) -> bool:
        """Wait for another request, or for the end of the connection."""
        source: Any = self.rfile
        self.connection.settimeout(IDLE_S)
        try:
            return bool(source.peek(1))
        except TimeoutError:
            return False
        finally:
            self.connection.settimeout(None)

    def finish(self) -> None:
        """Close the connection; what its client did not wait for is lost."""
        with suppress(ConnectionError):
            super().finish()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """No line for each request."""
