"""Side by side: the one place that starts threads to wait for several things at once."""

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from awsddp.errors import AwsddpError, NodeError

T = TypeVar("T")
S = TypeVar("S")
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Message = TypeVar("Message")
Given = ParamSpec("Given")
MEANWHILE_S = 5.0
"""How often `run_on_nodes` calls `meanwhile`, at most."""


def ignore(event: object) -> None:
    """Do nothing with an event."""


def soon(work: Callable[Given, T], /, *args: Given.args, **more: Given.kwargs) -> Future[T]:
    """Begin a read and return its result to be.

    On a thread that holds nobody up: where another result settles a command this one is not waited for.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **more))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def both(work: Callable[[], T], other: Callable[[], S]) -> tuple[T, S]:
    """Do `work` on this thread and `other` on another, and return both results once both have ended.

    Raises the error of `work`, else that of `other`.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(other)
        return work(), future.result()


def each(work: Callable[[Item], T], items: Iterable[Item], *, at_most: int = 16) -> list[T]:
    """Do `work` for all items, up to `at_most` at once, and return the results in order.

    Raises the first error, in the order of the items, once all have ended.
    """
    with ThreadPoolExecutor(max_workers=at_most) as pool:  # it starts no more threads than items
        return list(pool.map(work, items))


def all_reporting(
    works: Iterable[Callable[[Callable[[Message], None]], T]], *, on_event: Callable[[Message], None]
) -> list[T]:
    """Do several things at once that report events, and return their results in order. Raises as `each` does.

    Each gets a callback; `on_event` receives what they report on this thread, while it waits for them.
    """
    mailbox: SimpleQueue[Message | None] = SimpleQueue()
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(work, mailbox.put) for work in works]
        for future in futures:
            future.add_done_callback(lambda _: mailbox.put(None))
        for _ in futures:
            while (message := mailbox.get()) is not None:
                on_event(message)
    return [future.result() for future in futures]


def run_on_nodes(
    function: Callable[[int, Callable[[Message], None], threading.Event], T],
    nodes: Iterable[int],
    *,
    meanwhile: Callable[[], None] | None = None,
    on_event: Callable[[Message], None],
) -> dict[int, T | NodeError]:
    """Call `function(node, on_event, stop)` for all nodes at once; return each result or NodeError.

    Events reach `on_event` from the caller's thread only, from which `meanwhile` is called, too, after each
    MEANWHILE_S without an event. Any other exception, also an interrupt, is raised at once: it sets `stop`,
    so that the other calls can end, and does not wait for them.
    """
    mailbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
    stop = threading.Event()
    order = list(nodes)
    outcomes: dict[int, T | NodeError] = {}

    def settle(node: int, ended: Future[T]) -> None:
        error = ended.exception()
        outcomes[node] = error if isinstance(error, NodeError) else ended.result()

    def begin(node: int) -> None:
        work = soon(function, node, lambda event: mailbox.put(partial(on_event, event)), stop)
        work.add_done_callback(lambda ended: mailbox.put(partial(settle, node, ended)))

    try:
        for node in order:
            begin(node)
        while len(outcomes) < len(order):
            try:
                handle = mailbox.get(timeout=MEANWHILE_S)
            except Empty:
                handle = meanwhile or (lambda: None)
            handle()
    finally:
        stop.set()
    return {node: outcomes[node] for node in order}


def import_soon(module: str) -> None:
    """Import a module that will be needed while AWS or a node is waited for."""
    soon(importlib.import_module, module)


class NodesFailed(NodeError):
    """Some nodes failed. `failures` holds the error of each, `results` the results of the others."""

    def __init__(self, failures: Mapping[int, NodeError], results: Mapping[int, Any], of: int) -> None:
        ordered = [failures[node] for node in sorted(failures)]
        if len(ordered) == 1:
            super().__init__(ordered[0].message, ordered[0].why, ordered[0].next)
        else:
            same: dict[str, list[str]] = {}
            for error in ordered:
                name, separator, text = error.summary.partition(": ")  # a NodeFailure begins with its node
                if name not in (names := same.setdefault(separator + text, [])):
                    names.append(name)
            lines = [", ".join(names) + text for text, names in same.items()]
            super().__init__(f"{len(ordered)} of {of} nodes failed", "\n".join(lines), ordered[0].next)
        self.failures = dict(failures)
        self.results = dict(results)


def split(outcomes: Mapping[int, Outcome | AwsddpError]) -> dict[int, Outcome]:
    """Return the results by node. Raises NodesFailed for NodeErrors among them, any other error as it is."""
    failures: dict[int, NodeError] = {}
    results: dict[int, Outcome] = {}
    for node, outcome in outcomes.items():
        if isinstance(outcome, NodeError):
            failures[node] = outcome
        elif isinstance(outcome, AwsddpError):
            raise outcome
        else:
            results[node] = outcome
    if failures:
        raise NodesFailed(failures, results, len(outcomes))
    return results
