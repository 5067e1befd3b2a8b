"""The HTTP server of the metadata service, on 169.254.169.254 beside the nodes: in the switch's namespace.

Port 80 of the nodes themselves stays free. A socket belongs to the namespace in which it was made, whoever
accepts from it later; a node is known by its address.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from awsddp.local.network import METADATA_ADDRESS, NAMESPACES

CLONE_NEWNET = 0x40000000
PATIENCE_S = 5.0

Ask = Callable[[str, str, str, Mapping[str, str]], tuple[int, bytes]]
"""Address of the node, method, path and headers (lower-case names) to status and body."""


def serve(ask: Ask, namespace: str) -> None:
    """Serve in a namespace until this process ends.

    :raises OSError: the address cannot be bound there.
    """

    class Handler(BaseHTTPRequestHandler):
        """One connection with one or more requests."""

        server_version = "EC2ws"
        protocol_version = "HTTP/1.1"
        timeout = PATIENCE_S

        def reply(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.rfile.read(int(headers.get("content-length", 0)))
            status, body = ask(self.client_address[0], self.command, self.path, headers)
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = reply

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = _Server((METADATA_ADDRESS, 80), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = _listen(namespace)
    threading.Thread(target=server.serve_forever, name="metadata", daemon=True).start()


class _Server(ThreadingHTTPServer):
    """A server that says nothing of clients that leave early."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        return None


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
            made.append(socket.create_server((METADATA_ADDRESS, 80)))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
