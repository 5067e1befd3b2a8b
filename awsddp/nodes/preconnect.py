"""Connections that are opened early, while AWS is still answering."""

import contextlib
import threading
from collections.abc import Collection
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from awsddp.errors import NodeError
from awsddp.nodes.connection import Connection, Endpoint, connect, load_key
from awsddp.nodes.parallel import ignore
from awsddp.parallel import soon

_TIMEOUT_S = 15.0


class Preconnect:
    """Connections to nodes at their last known addresses: one attempt each, all at once.

    `take` hands one out, `close` cuts the others. Host keys are checked as always. Raises ConfigError for an
    invalid login key.
    """

    def __init__(self, endpoints: Collection[Endpoint], *, key: Path, known_hosts: Path) -> None:
        self._begun: dict[Endpoint, Future[Connection]] = {}
        if endpoints:
            once = threading.Event()
            once.set()
            connected = partial(connect, key=load_key(key), known_hosts=known_hosts, deadline_s=_TIMEOUT_S)
            self._begun = {one: soon(connected, one, stop=once, on_event=ignore) for one in endpoints}

    def take(self, endpoint: Endpoint) -> Connection | None:
        """Wait for the connection to this endpoint and return it; None if there is none or it failed."""
        begun = self._begun.pop(endpoint, None)
        with contextlib.suppress(NodeError):
            return begun.result() if begun is not None else None
        return None

    def close(self) -> None:
        """Cut the connections that were not taken, and those that are still being opened."""
        for begun in self._begun.values():
            begun.add_done_callback(_cut)


def _cut(begun: Future[Connection]) -> None:
    if begun.exception() is None:
        begun.result().drop()
