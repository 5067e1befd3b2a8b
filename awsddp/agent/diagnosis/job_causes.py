"""Why a job ends that no rank ended, and the form of every cause: kind, retryable, explanation, next step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from awsddp.agent.messages import Launch


class Row(NamedTuple):
    """A row of a table of causes. `retryable`: the same command may succeed without a change.

    `conditions` are by name (causes.py). A row without any, as in JOB_TABLE, is named by who has seen the
    cause, with the values of its texts.
    """

    kind: str
    explanation: str
    retryable: bool
    conditions: dict[str, str]
    next: str = ""


def rows(table: str) -> tuple[Row, ...]:
    """Read a table: "kind (retryable): explanation", and indented below it conditions and the `next` step.

    Patterns of the same condition are alternatives. A line that begins with # is a comment.
    """
    found: list[Row] = []
    for line in table.splitlines():
        word, _, text = line.strip().partition(" ")
        if word == "next":
            found[-1] = found[-1]._replace(next=text)
        elif line.startswith(" "):
            patterns = found[-1].conditions
            patterns[word] = f"{patterns[word]}|{text}" if word in patterns else text
        elif line and not line.startswith("#"):
            head, _, explanation = line.partition(":")
            kind, _, retryable = head.partition(" ")
            found.append(Row(kind, explanation.strip(), bool(retryable), {}))
    return tuple(found)


class Cause(NamedTuple):
    """Why a job, or a rank of it, ended. `values` are those of its texts; an old one may have no kind."""

    kind: str = "unknown"
    retryable: bool = False
    explanation: str = ""
    next: str = ""
    values: dict[str, str] = {}
    node: int | None = None
    instance_id: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    tail: list[str] | tuple[()] = ()


JOB_TABLE = rows("""
left_early: All ranks must call the same collectives.
  next end all ranks at the same step: see return, break and sys.exit() that only some ranks reach
uneven_batches: It was in backward(): the ranks do not have equally many batches.
  next use a DistributedSampler, drop_last=True, or: with model.join():
node_lost (retryable): {why}.
  next awsddp up && awsddp train   # replaces the node if it is gone
spot_interruption (retryable): {why}.
  next awsddp up && awsddp train   # replaces the node if it is gone
instance_retired (retryable): {why}.
  next awsddp up && awsddp train   # replaces the node if it is gone
timeout: The job ran for longer than its timeout of {seconds:g} s.
  next awsddp train --timeout TIME   # longer, if it was not hanging
hang: No rank wrote to its log for {seconds:g} s.
  next awsddp why {job} -v   # where each rank was
cancelled: It was cancelled.
interrupted (retryable): {why}.
  next awsddp up && awsddp train   # starts what is stopped
expired (retryable): {why}.
  next awsddp up --expires TIME && awsddp train   # starts the nodes with more time""")
LOSSES = ("node_lost", "spot_interruption", "instance_retired")
"""Kinds of a node that was lost."""
WAITED = ("peer_lost", "gloo_timeout", "nccl_timeout")
"""Kinds of a rank that waited for another."""
TIMED_OUT = frozenset({"gloo_timeout", "nccl_timeout", "rendezvous_timeout"})
"""Kinds of a rank that waited for another until a timeout: the other one may still run."""


def cause_of(row: Row, values: Mapping[str, str | float]) -> Cause:
    """Return the cause that a row words with `values`."""
    explanation, advice = row.explanation.format(**values), row.next.format(**values)
    shown = {name: str(value) for name, value in values.items()}
    return Cause(row.kind, row.retryable, explanation, advice, shown)


def cause_of_kind(kind: str, **values: str | float) -> Cause:
    """Return the cause that the row `kind` of JOB_TABLE words with `values`."""
    return cause_of(next(row for row in JOB_TABLE if row.kind == kind), values)


def cause_of_node(request: Launch, node: int | None, kind: str, **values: str | float) -> Cause:
    """Return the cause of a job that none of its ranks ended."""
    return located(request, node, cause_of_kind(kind, **values))


def located(request: Launch, node: int | None, cause: Cause) -> Cause:
    """Return a cause with the node, and its instance, on which it arose."""
    found = next((one for one in request.nodes if one.node == node), None)
    return cause._replace(node=node, instance_id=found.instance_id if found else None)


def with_address(cause: Cause, others: Iterable[Cause]) -> Cause:
    """Return the cause of a job whose ranks did not join, with the address at which one found nobody."""
    nobody = next((one for one in others if one.kind == "master_unreachable"), None)
    if cause.kind != "rendezvous_timeout" or nobody is None:
        return cause
    said = f"{cause.explanation} Rank {nobody.rank}: {nobody.explanation}"
    return nobody._replace(explanation=said)


def left_early(cause: Cause, early: str) -> Cause:
    """Return the cause of a rank that waited for others which had ended with 0, as `early` says."""
    is_backward = any("/torch/autograd/" in line or "/nn/parallel/" in line for line in cause.tail)
    found = cause_of_kind("uneven_batches" if is_backward else "left_early")
    explanation = f"{early}{cause.explanation} {found.explanation}"
    return cause._replace(
        kind=found.kind, retryable=found.retryable, explanation=explanation, next=found.next, values={}
    )
