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
def line(server: Any) -> Iterator[http.client.HTTPConnection]:
    made = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    yield made
    made.close()


def ask(line: http.client.HTTPConnection, path: str, body: Any = b"") -> tuple[int, bytes, bool]:
    """Status and body of a reply, and whether its connection carries another request."""
    line.request("PUT", path, body)
    reply = line.getresponse()
    return reply.status, reply.read(), line.sock is not None


def test_a_connection_carries_several_requests(line: http.client.HTTPConnection) -> None:
    line.connect()
    first = line.sock
    assert ask(line, "/read", b"one") == (200, b"one", True)
    assert ask(line, "/unread", bytes(3 << 20)) == (403, b"refused", True)
    assert ask(line, "/read", b"two") == (200, b"two", True)
    assert line.sock is first


def test_a_connection_ends_with_a_reply_that_is_cut(line: http.client.HTTPConnection) -> None:
    with pytest.raises(http.client.IncompleteRead):
        ask(line, "/short")


@pytest.mark.parametrize(
    ("path", "body", "reply"), [("/read", iter([b"one"]), (200, b"one")), ("/broken", b"", (500, None))]
)
def test_a_connection_ends_where_its_next_request_may_not_begin(
    line: http.client.HTTPConnection, path: str, body: Any, reply: tuple[int, bytes | None]
) -> None:
    line.connect()
    first: Any = line.sock
    status, found, _ = ask(line, path, body)
    assert (status, found if reply[1] else None) == reply
    assert first.fileno() == -1 or first.recv(1) == b""


@pytest.mark.parametrize("length", ["-1", "x", ""])
def test_a_length_that_is_no_number_is_refused(line: http.client.HTTPConnection, length: str) -> None:
    line.request("PUT", "/read", headers={"Content-Length": length})
    assert line.getresponse().status == 400


def test_a_client_that_leaves_in_the_middle_of_a_reply_is_no_error(
    server: Any, line: http.client.HTTPConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, over = [], threading.Event()
    monkeypatch.setattr(server, "handle_error", lambda *given: errors.append(given))
    monkeypatch.setattr(server, "shutdown_request", lambda request: over.set())
    line.request("GET", "/large")
    reply = line.getresponse()
    reply.read(1)
    reply.close()
    line.close()
    assert over.wait(30)
    assert errors == []
