"""HTTP servers inside the hosts' network namespaces, all in this process: what answers on 169.254.169.254.

A socket belongs to the namespace in which it was made, whoever accepts from it later.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from awsddp.local.network import METADATA_ADDRESS, NAMESPACES

CLONE_NEWNET = 0x40000000
PATIENCE_S = 5.0

Ask = Callable[[str, str, str, Mapping[str, str]], tuple[int, bytes]]
"""Instance id, method, path and headers (lower-case names) to status and body."""


class Servers:
    """One listening socket for each host; one thread accepts, a few answer."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._sockets: dict[str, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="metadata")
        self._thread = threading.Thread(target=self._accept, name="metadata", daemon=True)

    def open(self, instance_id: str, namespace: str) -> None:
        """Listens in a host's namespace; one that listens already is fine."""
        with self._lock:
            if instance_id in self._sockets or not (NAMESPACES / namespace).exists():
                return
            listening = _listen(namespace)
            self._sockets[instance_id] = listening
            self._selector.register(listening, selectors.EVENT_READ, instance_id)
            if not self._thread.is_alive():
                self._thread.start()

    def close(self, instance_id: str) -> None:
        """Leaves a host's namespace, which could not end else; none is fine."""
        with self._lock:
            listening = self._sockets.pop(instance_id, None)
            if listening is not None:
                self._selector.unregister(listening)
                listening.close()

    def _accept(self) -> None:
        while True:
            for key, _ in self._selector.select():
                listening: Any = key.fileobj
                with suppress(OSError):
                    connection, peer = listening.accept()
                    connection.settimeout(PATIENCE_S)
                    self._pool.submit(self._serve, connection, peer, key.data)

    def _serve(self, connection: socket.socket, peer: Any, instance_id: str) -> None:
        ask = self._ask

        class Handler(BaseHTTPRequestHandler):
            """One connection, one request or several."""

            server_version = "EC2ws"
            protocol_version = "HTTP/1.1"

            def reply(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                self.rfile.read(int(headers.get("content-length", 0)))
                status, body = ask(instance_id, self.command, self.path, headers)
                self.send_response(status)
                self.send_header("Content-Type", "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_HEAD = reply

            def log_message(self, format: str, *args: Any) -> None:
                return None

        with connection, suppress(OSError, ValueError):
            Handler(connection, peer, None)  # type: ignore[arg-type]


def _listen(namespace: str) -> socket.socket:
    """A socket made in the namespace by a thread that ends there."""
    made: list[socket.socket | OSError] = []

    def work() -> None:
        try:
            descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"setns {namespace}")
            finally:
                os.close(descriptor)
            listening = socket.create_server((METADATA_ADDRESS, 80))
            listening.setblocking(False)
            made.append(listening)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
