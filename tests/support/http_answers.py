"""An HTTP server on loopback that answers one request with given bytes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"
BAD_ANSWERS = (
    b"",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    CUT,
    CUT + b'{"instances": [',
    CUT.replace(b"99", b"2") + b"{]",
)
"""Answers of a server that dies, and of one with another protocol."""


@contextmanager
def serve_bytes(raw: bytes) -> Iterator[str]:
    """Yield the URL of a server that answers one request with `raw`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.recv(65536)
                link.sendall(raw)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)
