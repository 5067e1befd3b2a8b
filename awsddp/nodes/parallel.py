"""The same work for every node at once."""

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TypeVar

from awsddp.errors import NodeError
from awsddp.report import Event, OnEvent

Outcome = TypeVar("Outcome")


def ignore(event: Event) -> None:
    """Do nothing with an event."""


def side_by_side(
    work: Callable[[int, OnEvent, threading.Event], Outcome], nodes: Iterable[int], *, on_event: OnEvent
) -> dict[int, Outcome | NodeError]:
    """Call `work(node, on_event, stop)` for all nodes at once; return what each returned, or its NodeError.

    Events reach `on_event` from the caller's thread alone. Any other exception ends the whole at once, as an
    interrupt does; `stop` is then set, so that the rest of the work can end, and nobody waits for it.
    """
    mailbox: SimpleQueue[Event | tuple[int, Outcome | BaseException]] = SimpleQueue()
    stop = threading.Event()

    def carry_out(node: int) -> None:
        try:
            mailbox.put((node, work(node, mailbox.put, stop)))
        except BaseException as error:
            mailbox.put((node, error))

    order = list(nodes)
    outcomes: dict[int, Outcome | NodeError] = {}
    try:
        for node in order:
            threading.Thread(target=carry_out, args=(node,), daemon=True, name=f"node{node}").start()
        while len(outcomes) < len(order):
            mail = mailbox.get()
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
