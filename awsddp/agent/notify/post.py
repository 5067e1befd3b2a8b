"""Send an event to a URL with one POST request, whose connection may fail or whose answer may never come."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple

from awsddp.agent.notify.events import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TIMEOUT_S = 10.0
_MAX_HEAD_BYTES = 1 << 16
_TEMPORARY = (408, 429)
"""Status codes after which the same request may succeed, besides those from 500:
https://www.rfc-editor.org/rfc/rfc9110#section-15.5.9 and https://www.rfc-editor.org/rfc/rfc6585#section-4"""


class Outcome(NamedTuple):
    """How a request ended; `why` describes a failure, without the URL.

    `state` is "delivered", "unsent" (no byte of the request was sent), "refused" (the answer is final), or
    "unknown" (the request was sent, and the server may or may not have accepted it).
    """

    state: str
    why: str = ""


def encode_body(event: Mapping[str, Any], form: str) -> bytes:
    """Return the request's body for an event in the format `form`, "text" or "json".

    Slack, Mattermost and Discord's /slack take {"text": ...}:
    https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
    """
    fields = {name: event[name] for name in FIELDS}
    text = f"awsddp: {event['text']} [{event['id']}]"
    return json.dumps(fields if form == "json" else {"text": text}).encode()


def post(
    url: str, body: bytes, *, may_send: Callable[[], bool] = lambda: True, timeout_s: float = TIMEOUT_S
) -> Outcome:
    """Send `body` to `url`, and return how the request ended after at most `timeout_s` seconds.

    `may_send` is called once the connection is open (with TLS, and through the environment's proxy); if it
    returns False, the request is not sent. Redirects are not followed. Only an answer's head is read, up to
    64 KB.
    """
    attempt = _Attempt(may_send)
    threading.Thread(target=attempt.run, args=(url, body, timeout_s), daemon=True).start()
    return attempt.wait(timeout_s)


class _NotSentError(Exception):
    pass


class AnswerTooLongError(http.client.HTTPException):
    pass


class _Lines:
    """The lines of an answer's head, of at most _MAX_HEAD_BYTES."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, _MAX_HEAD_BYTES

    def readline(self, limit: int = -1) -> bytes:
        """Return the next line. Raises AnswerTooLongError; a server could send "100 Continue" without end."""
        line: bytes = self._file.readline(limit)
        self._left -= len(line)
        if self._left < 0:
            raise AnswerTooLongError
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Response(http.client.HTTPResponse):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fp: Any = _Lines(self.fp)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Make the redirect an error, because another host must not get the event."""


class _Attempt:
    """One request, in a thread, because neither a name lookup nor a slow answer has a timeout of its own."""

    def __init__(self, may_send: Callable[[], bool]) -> None:
        self._may_send = may_send
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._outcome: Outcome | None = None
        self._is_late = self._is_sent = False
        self._connection: http.client.HTTPConnection | None = None

    def run(self, url: str, body: bytes, timeout_s: float) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "awsddp"}
        try:
            request = urllib.request.Request(url, body, headers, method="POST")
            opener = urllib.request.build_opener(_NoRedirect, *self._handlers())
            opener.open(request, timeout=timeout_s).close()
            self._outcome = Outcome("delivered")
        except urllib.error.HTTPError as error:
            error.close()
            is_final = error.code < 500 and error.code not in _TEMPORARY
            self._outcome = Outcome("refused" if is_final else "unknown", f"HTTP status {error.code}")
        except Exception as error:
            self._outcome = Outcome("unknown" if self._is_sent else "unsent", _describe(error))
        self._ended.set()

    def wait(self, timeout_s: float) -> Outcome:
        self._ended.wait(timeout_s)
        with self._lock:
            self._is_late = True
        if self._outcome is not None:
            return self._outcome
        with contextlib.suppress(OSError, AttributeError):  # ends an answer that is slow or endless
            self._connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        return Outcome("unknown" if self._is_sent else "unsent", f"no answer within {timeout_s:g} s")

    def _on_connected(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if self._is_late or not self._may_send():
                raise _NotSentError
            self._is_sent, self._connection = True, connection

    def _handlers(self) -> tuple[urllib.request.BaseHandler, ...]:
        """Return handlers whose connections call `_on_connected` before the request is sent."""
        attempt = self

        class Plain(http.client.HTTPConnection):
            response_class = _Response

            def connect(self) -> None:
                super().connect()
                attempt._on_connected(self)

        class Encrypted(http.client.HTTPSConnection):
            response_class = _Response

            def connect(self) -> None:
                super().connect()
                attempt._on_connected(self)

        class PlainHandler(urllib.request.HTTPHandler):
            def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Plain, request)

        class EncryptedHandler(urllib.request.HTTPSHandler):
            def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Encrypted, request)

        return PlainHandler(), EncryptedHandler()


def _describe(error: Exception) -> str:
    """Return an error's text, or only its type if the text could contain the URL."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    text = str(reason) if isinstance(reason, OSError) else type(reason).__name__
    return " ".join(text.split())[:200]
