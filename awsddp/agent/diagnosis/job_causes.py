"""The causes of a job's end other than a rank's end, and the data types for all causes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from awsddp.agent.messages import Launch


class Row(NamedTuple):
    """A row in a table of causes. `retryable` means that the same command may succeed without any change.

    `conditions` maps names of conditions (causes.py) to patterns. Rows without conditions, such as those in
    JOB_TABLE, are selected by their kind.
    """

    kind: str
    explanation: str
    retryable: bool
    conditions: dict[str, str]
    next: str = ""


def rows(table: str) -> tuple[Row, ...]:
    """Parse a table of rows "kind (retryable): explanation", each with indented conditions and a `next` step.

    Patterns for the same condition are alternatives. A line that begins with # is a comment.
    """
    table_rows: list[Row] = []
    for line in table.splitlines():
        keyword, _, text = line.strip().partition(" ")
        if keyword == "next":
            table_rows[-1] = table_rows[-1]._replace(next=text)
        elif line.startswith(" "):
            patterns = table_rows[-1].conditions
            patterns[keyword] = f"{patterns[keyword]}|{text}" if keyword in patterns else text
        elif line and not line.startswith("#"):
            head, _, explanation = line.partition(":")
            kind, _, retryable = head.partition(" ")
            table_rows.append(Row(kind, explanation.strip(), bool(retryable), {}))
    return tuple(table_rows)


class Cause(NamedTuple):
    """The reason why a job, or one of its ranks, ended.

    `values` are the values that were inserted into the texts. A cause from an old version of awsddp may have
    no kind.
    """

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
uneven_batches: The rank was in backward(): the ranks do not have the same number of batches.
  next use a DistributedSampler, drop_last=True, or: with model.join():
node_lost (retryable): {why}.
  next awsddp recover {job}   # on repaired nodes, from its newest checkpoint
spot_interruption (retryable): {why}.
  next awsddp recover {job}   # on repaired nodes, from its newest checkpoint
instance_retired (retryable): {why}.
  next awsddp recover {job}   # on repaired nodes, from its newest checkpoint
timeout: The job ran for longer than its timeout of {seconds:g} s.
  next awsddp train --timeout TIME   # a longer timeout, if the job did not hang
hang: No rank wrote to its log for {seconds:g} s.
  next awsddp why {job} -v   # where each rank was
cancelled: It was cancelled.
interrupted (retryable): {why}.
  next awsddp recover {job}   # on repaired nodes, from its newest checkpoint
expired (retryable): {why}.
  next awsddp up --expires TIME && awsddp train   # starts the nodes with more time""")
LOSSES = ("node_lost", "spot_interruption", "instance_retired")
"""The kinds of causes that mean that a node was lost."""
NODE_FAULTS = ("xid", "ecc_error", "network_failed")
"""The kinds of causes that mean that a node's GPU or network device failed, according to the node itself."""
WAITED = ("peer_lost", "gloo_timeout", "nccl_timeout")
"""The kinds of causes for a rank that waited for another rank."""
TIMED_OUT = frozenset({"gloo_timeout", "nccl_timeout", "rendezvous_timeout"})
"""The kinds of causes for a rank that waited until a timeout for a rank that may still be running."""


def cause_of(row: Row, values: Mapping[str, str | float]) -> Cause:
    """Return the cause that a row describes, with `values` inserted into the row's texts."""
    explanation, advice = row.explanation.format(**values), row.next.format(**values)
    shown = {name: str(value) for name, value in values.items()}
    return Cause(row.kind, row.retryable, explanation, advice, shown)


def cause_of_kind(kind: str, **values: str | float) -> Cause:
    """Return the cause that the row `kind` in JOB_TABLE describes, with `values` inserted into its texts."""
    return cause_of(next(row for row in JOB_TABLE if row.kind == kind), values)


def cause_of_node(request: Launch, node: int | None, kind: str, **values: str | float) -> Cause:
    """Return the cause of `kind` from JOB_TABLE, on `node` (None: on no particular node)."""
    return with_node(request, node, cause_of_kind(kind, job=request.job, **values))


def with_node(request: Launch, node: int | None, cause: Cause) -> Cause:
    """Return a copy of the cause that names `node` and its instance (None: no particular node)."""
    launch_node = next((entry for entry in request.nodes if entry.node == node), None)
    return cause._replace(node=node, instance_id=launch_node.instance_id if launch_node else None)


def with_address(cause: Cause, causes: Iterable[Cause]) -> Cause:
    """Return `cause`, unless another cause explains it.

    If `cause` is a rendezvous timeout and `causes` has a master_unreachable cause, return the first such
    cause with both explanations.
    """
    unreachable = next((other for other in causes if other.kind == "master_unreachable"), None)
    if cause.kind != "rendezvous_timeout" or unreachable is None:
        return cause
    explanation = f"{cause.explanation} Rank {unreachable.rank}: {unreachable.explanation}"
    return unreachable._replace(explanation=explanation)


def explain_early_exit(cause: Cause, early_exits: str) -> Cause:
    """Return the cause for a rank that waited for ranks that had ended with exit code 0.

    `early_exits` is a sentence that names the ranks that had ended.
    """
    is_backward = any("/torch/autograd/" in line or "/nn/parallel/" in line for line in cause.tail)
    job_cause = cause_of_kind("uneven_batches" if is_backward else "left_early")
    explanation = f"{early_exits}{cause.explanation} {job_cause.explanation}"
    return cause._replace(
        kind=job_cause.kind,
        retryable=job_cause.retryable,
        explanation=explanation,
        next=job_cause.next,
        values={},
    )
