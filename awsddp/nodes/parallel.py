"""The same function for several nodes at once."""

import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import TypeVar

from awsddp.errors import NodeError
from awsddp.report import Event, OnEvent

Outcome = TypeVar("Outcome")
MEANWHILE_S = 5.0
"""How often `meanwhile` is called, at most."""


def ignore(event: Event) -> None:
    """Do nothing with an event."""


def run_on_nodes(
    function: Callable[[int, OnEvent, threading.Event], Outcome],
    nodes: Iterable[int],
    *,
    meanwhile: Callable[[], None] | None = None,
    on_event: OnEvent,
) -> dict[int, Outcome | NodeError]:
    """Call `function(node, on_event, stop)` for all nodes at once; return each result or NodeError.

    Events reach `on_event` from the caller's thread only, from which `meanwhile` is called, too, after each
    MEANWHILE_S without an event. Any other exception, also an interrupt, is raised at once: it sets `stop`,
    so that the other calls can end, and does not wait for them.
    """
    mailbox: SimpleQueue[Event | tuple[int, Outcome | BaseException]] = SimpleQueue()
    stop = threading.Event()

    def run(node: int) -> None:
        try:
            mailbox.put((node, function(node, mailbox.put, stop)))
        except BaseException as error:
            mailbox.put((node, error))

    order = list(nodes)
    outcomes: dict[int, Outcome | NodeError] = {}
    try:
        for node in order:
            threading.Thread(target=run, args=(node,), daemon=True, name=f"node{node}").start()
        while len(outcomes) < len(order):
            try:
                mail = mailbox.get(timeout=None if meanwhile is None else MEANWHILE_S)
            except Empty:
                assert meanwhile is not None
                meanwhile()
                continue
            if isinstance(mail, Event):
                on_event(mail)
                continue
            node, outcome = mail
            if isinstance(outcome, BaseException) and not isinstance(outcome, NodeError):
                raise outcome
            outcomes[node] = outcome
    finally:
        stop.set()
    return {node: outcomes[node] for node in order}
