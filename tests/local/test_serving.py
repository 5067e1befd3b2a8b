"""Connections to the local cloud."""

import http.client
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

from awsddp.local.serving import KeepAliveHandler


def application(environ: dict[str, Any], start_response: Any) -> Any:
    request = Request(environ)
    replies: dict[str, Callable[[], Response]] = {
        "/read": lambda: Response(request.get_data()),
        "/unread": lambda: Response("refused", 403),
        "/large": lambda: Response(iter([bytes(10_000)] * 6_000), headers={"Content-Length": "60000000"}),
        "/short": lambda: Response(iter([b"half"]), headers={"Content-Length": "8"}),
    }
    return replies[request.path]()(environ, start_response)


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = make_server("127.0.0.1", 0, application, threaded=True, request_handler=KeepAliveHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def connection(server: Any) -> Iterator[http.client.HTTPConnection]:
    client = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    yield client
    client.close()


def send(connection: http.client.HTTPConnection, path: str, body: Any = b"") -> tuple[int, bytes, bool]:
    """Return status and body of a reply, and True if its connection is still open."""
    connection.request("PUT", path, body)
    reply = connection.getresponse()
    return reply.status, reply.read(), connection.sock is not None


def test_a_connection_carries_several_requests(connection: http.client.HTTPConnection) -> None:
    connection.connect()
    first = connection.sock
    assert send(connection, "/read", b"one") == (200, b"one", True)
    assert send(connection, "/unread", bytes(3 << 20)) == (403, b"refused", True)
    assert send(connection, "/read", b"two") == (200, b"two", True)
    assert connection.sock is first


def test_a_connection_ends_with_an_incomplete_reply(connection: http.client.HTTPConnection) -> None:
    with pytest.raises(http.client.IncompleteRead):
        send(connection, "/short")


@pytest.mark.parametrize(
    ("path", "body", "reply"), [("/read", iter([b"one"]), (200, b"one")), ("/broken", b"", (500, None))]
)
def test_a_connection_is_closed_after_a_chunked_body_and_after_an_error(
    connection: http.client.HTTPConnection, path: str, body: Any, reply: tuple[int, bytes | None]
) -> None:
    connection.connect()
    first: Any = connection.sock
    status, data, _ = send(connection, path, body)
    assert (status, data if reply[1] else None) == reply
    assert first.fileno() == -1 or first.recv(1) == b""


@pytest.mark.parametrize("length", ["-1", "x", ""])
def test_an_invalid_content_length_is_refused(connection: http.client.HTTPConnection, length: str) -> None:
    connection.request("PUT", "/read", headers={"Content-Length": length})
    assert connection.getresponse().status == 400


def test_a_client_that_disconnects_during_a_reply_is_no_error(
    server: Any, connection: http.client.HTTPConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, closed = [], threading.Event()
    monkeypatch.setattr(server, "handle_error", lambda *arguments: errors.append(arguments))
    monkeypatch.setattr(server, "shutdown_request", lambda request: closed.set())
    connection.request("GET", "/large")
    reply = connection.getresponse()
    reply.read(1)
    reply.close()
    connection.close()
    assert closed.wait(30)
    assert errors == []
