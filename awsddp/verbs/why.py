"""doctor --why: where the ranks of a job are at this moment, or were before it was ended for hanging."""

import contextlib
from typing import Any

from awsddp.answers import check
from awsddp.errors import AwsddpError, NotFoundError
from awsddp.jobs.supervisor.hang import diagnose, ranges
from awsddp.jobs.supervisor.stacks import DUMP
from awsddp.records import JobRecord
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context
from awsddp.verbs.requests import answers_of, holders
from awsddp.verbs.results import ended_job, results_dir

__all__ = ["ranges", "why"]

ASK_S = 8.0
"""How long a node may take to answer: it bounds its own work to 2 s."""


def why(ctx: Context, job: str) -> dict[str, Any]:
    """Return where each rank of a job is, and which are behind. The job runs on.

    Of a job that has ended: what was written before its end, if anything. Raises NotFoundError.
    """
    ended = ended_job(results_dir(ctx, job))
    if ended is not None:
        return _written(ctx, ended)
    with ClusterHandle.partly_ready(ctx) as cluster, cluster.connect_reachable() as fleet:
        found = cluster.job(job)
        if found.state != "running":
            raise _nothing(found, f"awsddp fetch {job}   # then again: it may hold what was written")
        request = {"do": "stacks", "job": job}
        answers = answers_of(fleet, dict.fromkeys(holders(fleet, found), request), timeout_s=ASK_S)
        for answer in answers.values():
            if isinstance(answer, AwsddpError):
                ctx.say(answer.message)
        numbers = {one.instance_id: one.node for one in found.nodes}
        asked = {numbers[fleet.endpoints[node].instance_id]: answer for node, answer in answers.items()}
    return _document(found, {node: one for node, one in asked.items() if isinstance(one, dict)})


def _written(ctx: Context, job: JobRecord) -> dict[str, Any]:
    """Return what the nodes wrote before a job ended, from its folder of results. Raises NotFoundError."""
    request, answers = {"do": "stacks", "job": job.job}, {}
    for node in job.nodes:
        path = results_dir(ctx, job.job) / f"node{node.node}" / "run" / DUMP
        with contextlib.suppress(OSError):
            answers[node.node] = check(path.read_bytes(), request=request, node=node.node)
    if not answers:
        raise _nothing(job, "")
    return _document(job, answers, ended=False)


def _nothing(job: JobRecord, advice: str) -> NotFoundError:
    cause = job.cause.explanation if job.cause else ""
    return NotFoundError(f"job {job.job} {job.state}: it is no longer running", cause, advice)


def _document(job: JobRecord, answers: dict[int, dict[str, Any]], *, ended: bool = True) -> dict[str, Any]:
    """Return the document; with `ended` ranks that have an exit code are known to have ended."""
    layout = [(one.rank, one.local_rank, one.node) for one in job.ranks]
    codes = {one.rank: one.exit_code for one in job.ranks if ended and one.exit_code is not None}
    return {"job": job.job, "state": job.state, **diagnose(layout, answers, exit_codes=codes)}
