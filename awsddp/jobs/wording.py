"""What this machine says of a job's end: a node sends the kind and what its rank said, not our advice."""

from dataclasses import replace

from awsddp.cluster import Cause

_MOST_CHARACTERS = 4000


def worded(cause: Cause, *, job: str) -> Cause:
    """Return a cause that a node sent, as it may be shown: `next` is made here, from its kind.

    The explanation is one line, and each line of the tail is one, so that nothing of it stands at a margin.
    A kind that this awsddp does not know has no next step; nor has a cause to which the node gave none.
    """
    return replace(
        cause,
        explanation=" ".join(cause.explanation.split())[:_MOST_CHARACTERS],
        next=_next(cause.kind, job) if cause.next else "",
        tail=tuple(line for text in cause.tail for line in text.splitlines() or [""]),
    )


def _next(kind: str, job: str) -> str:
    from awsddp.jobs.supervisor.causes import TABLE
    from awsddp.jobs.supervisor.job_causes import JOB_TABLE

    row = next((row for row in (*TABLE, *JOB_TABLE) if row.kind == kind), None)
    return row.next.format(job=job) if row is not None else ""
