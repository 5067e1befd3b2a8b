"""HTTP for the endpoint and for the nodes, with keep-alive connections like AWS's.

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

IDLE_S = 20.0  # an idle connection is closed after this time
DRAINED = 1 << 20  # bytes per read while an unread body is discarded


class Body:
    """A stream with one request's body, without later data on the connection. `unread` counts its unread
    bytes."""

    def __init__(self, source: io.BufferedIOBase, size: int) -> None:
        self._source = source
        self.unread = size

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, or b"" at the end of the body."""
        return self._count(self._source.read(self._limit(size)))

    def readline(self, size: int = -1) -> bytes:
        """Return a line, or its first `size` bytes."""
        return self._count(self._source.readline(self._limit(size)))

    def _limit(self, size: int) -> int:
        return self.unread if size < 0 else min(size, self.unread)

    def _count(self, data: bytes) -> bytes:
        self.unread -= len(data)
        return data


class KeepAliveHandler(WSGIRequestHandler):
    """Handles one connection, which is closed if a request body or a response is incomplete."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # the head and body of a small response fit into one packet
    disable_nagle_algorithm = True

    def run_wsgi(self) -> None:
        """Respond to one request."""
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
            is_complete = self._respond(environ)
            while body.read(DRAINED):  # a client reads an early error only after it has sent its body
                pass
        except ConnectionError:
            is_complete = False
        must_close = is_chunked or not is_complete or body.unread > 0
        self.close_connection = self.close_connection or must_close or not self._wait_for_request()

    def _respond(self, environ: dict[str, Any]) -> bool:
        """Send the response; return True if its length matches its head. Raises ConnectionError."""
        try:
            return self._send(environ, self.server.app)
        except ConnectionError:
            raise
        except Exception:
            traceback.print_exc()
            return self._send(environ, InternalServerError()) and False

    def _send(self, environ: dict[str, Any], application: Any) -> bool:
        head: list[Any] = []
        parts: Iterable[bytes] = application(environ, lambda *arguments: head.extend(arguments))
        try:
            status, headers = head[:2]
            code, _, reason = status.partition(" ")
            self.send_response(int(code), reason)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            remaining = int(dict(headers).get("Content-Length", 0)) if self.command != "HEAD" else 0
            for data in parts:
                self.wfile.write(data)
                remaining -= len(data)
            self.wfile.flush()
            return remaining == 0
        finally:
            getattr(parts, "close", lambda: None)()

    def _wait_for_request(self) -> bool:
        """Wait for the next request; return False if none arrives within IDLE_S or the client disconnects."""
        source: Any = self.rfile
        self.connection.settimeout(IDLE_S)
        try:
            return bool(source.peek(1))
        except TimeoutError:
            return False
        finally:
            self.connection.settimeout(None)

    def finish(self) -> None:
        """Close the connection; ignore unsent data that the client did not wait for."""
        with suppress(ConnectionError):
            super().finish()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Do nothing, so that no line is logged for a request."""
