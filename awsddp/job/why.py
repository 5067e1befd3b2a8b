"""why: where each rank of a job is, and which are behind."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import convert, to_builtins

from awsddp.agent import messages
from awsddp.agent.diagnosis.hang import diagnose
from awsddp.agent.diagnosis.stacks import DUMP, read_stacks
from awsddp.agent.messages import plain
from awsddp.agent_client.calls import answers_of
from awsddp.errors import AwsddpError
from awsddp.job.registry import JobRegistry
from awsddp.job.reported import told_job
from awsddp.model.documents import WhyDocument
from awsddp.model.node_answers import Stacks, read_answer
from awsddp.model.records import ACTIVE, JobRecord
from awsddp.session.connect import connect_reachable, preconnected_cluster
from awsddp.session.context import Session
from awsddp.storage.results_dir import job_result
from awsddp.storage.saved_job import is_saved

STACKS_S = 8.0
"""How long a node may take to answer: it bounds its own work to 2 s."""


def why(session: Session, job: str | None = None) -> WhyDocument:
    """Return where each rank of a job is, and which are behind; by default of the last one that has begun.

    Of a job that does not run: its end as `result`, and where its ranks were, if that was written. Raises
    NotFoundError, NodeError.
    """
    known = JobRegistry(session).find(job)
    if known is not None and (is_saved(job) or known.job.state not in ACTIVE):
        return _ended(session, known.job, known.folder)
    with preconnected_cluster(session) as cluster, connect_reachable(cluster) as connected:
        name = None if job in (None, "last") else known.job.job if known else job
        found = told_job(connected, name, ran=True)
        if found.state != "running":
            return _ended(session, found, session.results / found.job)
        request = messages.Stacks(job=found.job)
        answers = answers_of(
            connected.fleet, dict.fromkeys(connected.fleet.holders(found), request), timeout_s=STACKS_S
        )
        for answer in answers.values():
            if isinstance(answer, AwsddpError):
                session.say(answer.message)
        numbers = {one.instance_id: one.node for one in found.nodes}
        asked = {
            numbers[connected.fleet.endpoints[node].instance_id]: answer for node, answer in answers.items()
        }
    return _where(found, {node: one for node, one in asked.items() if isinstance(one, Stacks)})


def _ended(session: Session, job: JobRecord, folder: Path) -> WhyDocument:
    """Return why a job ended; `folder` has its results, and what its nodes wrote before its end."""
    answers = {}
    for node in job.nodes:
        path = folder / f"node{node.node}" / "run" / DUMP
        with contextlib.suppress(OSError):
            answers[node.node] = read_answer(path.read_bytes(), Stacks, node=node.node)
    found = _where(job if answers else replace(job, ranks=()), answers, ended=False)
    if not answers:
        found.explanation = job.cause.explanation if job.cause else f"It is {job.state}."
    found.result = job_result(session, job, folder=folder)
    return found


def _where(job: JobRecord, answers: Mapping[int, Stacks], *, ended: bool = True) -> WhyDocument:
    """Return the document; with `ended` ranks that have an exit code are known to have ended."""
    layout = [(one.rank, one.local_rank, one.node) for one in job.ranks]
    codes = {one.rank: one.exit_code for one in job.ranks if ended and one.exit_code is not None}
    seen = {node: read_stacks(to_builtins(one)) for node, one in answers.items()}
    found = diagnose(layout, seen, exit_codes=codes)
    return convert({"job": job.job, "state": job.state, **plain(found)}, WhyDocument)
