"""Connections begun before it is known that they are wanted: they are made while AWS is still being asked."""

import contextlib
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from awsddp.errors import NodeError
from awsddp.nodes.connection import Connection, Endpoint, connect, load_key
from awsddp.nodes.parallel import ignore

_PATIENCE_S = 15.0


class HeadStart:
    """Connections to nodes where they were last seen, each tried once, all begun at once.

    Who learns that a node is still there takes its connection; `close` cuts those that nobody took. Host keys
    are as strict as ever. Raises ConfigError for a login key that cannot be used.
    """

    def __init__(self, endpoints: Iterable[Endpoint], *, key: Path, known_hosts: Path) -> None:
        self._begun: dict[Endpoint, Future[Connection]] = {one: Future() for one in endpoints}
        loaded = load_key(key) if self._begun else None
        once = threading.Event()
        once.set()

        def begin(endpoint: Endpoint, begun: Future[Connection]) -> None:
            assert loaded is not None
            try:
                begun.set_result(
                    connect(
                        endpoint,
                        key=loaded,
                        known_hosts=known_hosts,
                        deadline_s=_PATIENCE_S,
                        stop=once,
                        on_event=ignore,
                    )
                )
            except BaseException as error:
                begun.set_exception(error)

        for one in self._begun.items():
            threading.Thread(target=begin, args=one, daemon=True).start()

    def take(self, endpoint: Endpoint) -> Connection | None:
        """Return the connection to a node that is exactly there, once it is made; None where none is."""
        begun = self._begun.pop(endpoint, None)
        with contextlib.suppress(NodeError):
            return begun.result() if begun is not None else None
        return None

    def close(self) -> None:
        """Cut the connections that were not taken, also those that are still being made."""
        for begun in self._begun.values():
            begun.add_done_callback(_cut)


def _cut(begun: "Future[Connection]") -> None:
    if begun.exception() is None:
        begun.result().drop()
