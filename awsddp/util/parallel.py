"""Run functions in parallel threads. To wait for several results, other modules use these functions and do
not start threads themselves."""

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
Params = ParamSpec("Params")
MEANWHILE_S = 5.0
"""`run_on_nodes` calls `on_idle` after this time without an event."""


def ignore_event(event: object) -> None:
    """Ignore an event."""


def run_in_thread(work: Callable[Params, T], /, *args: Params.args, **more: Params.kwargs) -> Future[T]:
    """Run `work` in a daemon thread and return its future. The process can exit before `work` has ended."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **more))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def run_both(work: Callable[[], T], other: Callable[[], S]) -> tuple[T, S]:
    """Run `work` in this thread and `other` in a second one; return both results when both have ended.

    Raises the error from `work` or, if `work` succeeds, the error from `other`.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(other)
        return work(), future.result()


def run_each(work: Callable[[Item], T], items: Iterable[Item], *, at_most: int = 16) -> list[T]:
    """Run `work` for all items, up to `at_most` at once, and return the results in order.

    If calls fail, raises the error of the first such item after all calls have ended.
    """
    with ThreadPoolExecutor(max_workers=at_most) as pool:  # a pool starts at most one thread per item
        return list(pool.map(work, items))


def run_all_with_events(
    works: Iterable[Callable[[Callable[[Message], None]], T]], *, on_event: Callable[[Message], None]
) -> list[T]:
    """Run several functions in parallel, and return their results in order.

    Each function is called with a callback for its events. While this thread waits, it passes the events to
    `on_event`. Raises the same error as `run_each`.
    """
    queue: SimpleQueue[Message | None] = SimpleQueue()
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(work, queue.put) for work in works]
        for future in futures:
            future.add_done_callback(lambda _: queue.put(None))
        for _ in futures:
            while (message := queue.get()) is not None:
                on_event(message)
    return [future.result() for future in futures]


def run_on_nodes(
    function: Callable[[int, Callable[[Message], None], threading.Event], T],
    nodes: Iterable[int],
    *,
    on_idle: Callable[[], None] | None = None,
    on_event: Callable[[Message], None],
) -> dict[int, T | NodeError]:
    """Call `function(node, on_event, stop)` for all nodes in parallel; return {node: result or NodeError}.

    `on_event` and `on_idle` are called only in the caller's thread, and `on_idle` is called whenever
    MEANWHILE_S have passed without an event. Any exception other than NodeError, including an interrupt, is
    raised without waiting for the other calls; `stop` is set, so that these calls can end.
    """
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
    stop = threading.Event()
    order = list(nodes)
    outcomes: dict[int, T | NodeError] = {}

    def store_outcome(node: int, future: Future[T]) -> None:
        error = future.exception()
        outcomes[node] = error if isinstance(error, NodeError) else future.result()

    def start(node: int) -> None:
        future = run_in_thread(function, node, lambda event: queue.put(partial(on_event, event)), stop)
        future.add_done_callback(lambda ended: queue.put(partial(store_outcome, node, ended)))

    try:
        for node in order:
            start(node)
        while len(outcomes) < len(order):
            try:
                handle = queue.get(timeout=MEANWHILE_S)
            except Empty:
                handle = on_idle or (lambda: None)
            handle()
    finally:
        stop.set()
    return {node: outcomes[node] for node in order}


def import_in_thread(module: str) -> None:
    """Import a module in a thread, so that the module is loaded by the time AWS or a node responds."""
    run_in_thread(importlib.import_module, module)


class NodesFailed(NodeError):
    """Some nodes failed.

    `failures` maps these nodes to their errors, and `results` maps the other nodes to their results.
    """

    def __init__(self, failures: Mapping[int, NodeError], results: Mapping[int, Any], of: int) -> None:
        ordered = [failures[node] for node in sorted(failures)]
        if len(ordered) == 1:
            super().__init__(ordered[0].message, ordered[0].why, ordered[0].next)
        else:
            nodes_by_text: dict[str, list[str]] = {}
            for error in ordered:
                # the text of a NodeFailure begins with the node's name
                name, separator, text = error.summary.partition(": ")
                if name not in (names := nodes_by_text.setdefault(separator + text, [])):
                    names.append(name)
            lines = [", ".join(names) + text for text, names in nodes_by_text.items()]
            super().__init__(f"{len(ordered)} of {of} nodes failed", "\n".join(lines), ordered[0].next)
        self.failures = dict(failures)
        self.results = dict(results)


def results_or_raise(outcomes: Mapping[int, Outcome | AwsddpError]) -> dict[int, Outcome]:
    """Return {node: result}. Raises NodesFailed if there is a NodeError; raises other errors unchanged."""
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
