"""Why a job ends that no rank ended, and the form of every cause: kind, retryable, explanation, next step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    # Returns the values of the row's texts, None for another cause. Python 3.8 could not evaluate it.
    Recognizer = Callable[[Any], "dict[str, str] | None"]


class Row(NamedTuple):
    """A cause. `retryable`: the same command may succeed without a change.

    `recognize` is a pattern in what the rank said, or a function. Where it is "", as in JOB_TABLE, the
    supervisor names the kind itself, with the values of its texts.
    """

    kind: str
    recognize: str | Recognizer
    explanation: str
    next: str = ""
    retryable: bool = False


_REPLACE = "awsddp up && awsddp train   # replaces the node if it is gone"
JOB_TABLE = (
    Row(
        "left_early",
        "",
        "All ranks must call the same collectives.",
        "end all ranks at the same step: see return, break and sys.exit() that only some ranks reach",
    ),
    Row(
        "uneven_batches",
        "",
        "It was in backward(): the ranks do not have equally many batches.",
        "use a DistributedSampler, drop_last=True, or: with model.join():",
    ),
    Row("node_lost", "", "{why}.", _REPLACE, retryable=True),
    Row("spot_interruption", "", "{why}.", _REPLACE, retryable=True),
    Row("instance_retired", "", "{why}.", _REPLACE, retryable=True),
    Row(
        "timeout",
        "",
        "The job ran for longer than its timeout of {seconds:g} s.",
        "awsddp train --timeout TIME   # longer, if it was not hanging",
    ),
    Row(
        "hang",
        "",
        "No rank wrote to its log for {seconds:g} s.",
        "awsddp doctor --why {job}   # where each rank was",
    ),
    Row("cancelled", "", "It was cancelled."),
    Row(
        "interrupted",
        "",
        "{why}.",
        "awsddp up && awsddp train   # starts what is stopped",
        retryable=True,
    ),
    Row(
        "expired",
        "",
        "{why}.",
        "awsddp up --expires TIME && awsddp train   # starts the nodes with more time",
        retryable=True,
    ),
)
LOSSES = ("node_lost", "spot_interruption", "instance_retired")
"""Kinds of a node that was lost."""
WAITED = ("peer_lost", "gloo_timeout", "nccl_timeout")
"""Kinds of a rank that waited for another."""
TIMED_OUT = frozenset({"gloo_timeout", "nccl_timeout", "rendezvous_timeout"})
"""Kinds of a rank that waited for another until a timeout: the other one may still run."""


def cause_of_node(request: dict[str, Any], node: int | None, kind: str, **values: Any) -> dict[str, Any]:
    """Return the cause of a job that none of its ranks ended; `values` are those of the row's texts."""
    words = words_of(next(row for row in JOB_TABLE if row.kind == kind), values)
    return cause(request, node, words, values={name: str(value) for name, value in values.items()})


def cause(request: dict[str, Any], node: int | None, words: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the cause of a job as its document holds it. `words` are those of `explain`."""
    ids = {entry["node"]: entry["instance_id"] for entry in request["nodes"]}
    instance_id = None if node is None else ids[node]
    blank: dict[str, Any] = {"rank": None, "exit_code": None, "signal": None, "tail": [], "values": {}}
    return {**blank, "node": node, "instance_id": instance_id, **words, **more}


def words_of(row: Row, values: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a cause that its row decides."""
    return {
        "kind": row.kind,
        "retryable": row.retryable,
        "explanation": row.explanation.format(**values),
        "next": row.next.format(**values),
    }


def left_early(words: dict[str, Any], tail: list[str], early: str) -> dict[str, Any]:
    """Return the cause of a rank that waited for others which had ended with 0, as `early` says."""
    is_backward = any("/torch/autograd/" in line or "/nn/parallel/" in line for line in tail)
    kind = "uneven_batches" if is_backward else "left_early"
    found = words_of(next(row for row in JOB_TABLE if row.kind == kind), {})
    return {**found, "explanation": f"{early}{words['explanation']} {found['explanation']}"}
