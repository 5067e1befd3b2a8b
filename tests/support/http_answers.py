"""A server on loopback that answers one request with the bytes that it was given, whole or cut."""

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
"""Answers as a server that dies, or one of another protocol, gives them."""


@contextmanager
def answering(raw: bytes) -> Iterator[str]:
    """The address of such a server."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.recv(65536)
                link.sendall(raw)

        one = threading.Thread(target=answer, daemon=True)
        one.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        one.join(10)
