"""why: report where each of a job's ranks is, and which ranks are behind."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import convert, to_builtins

from awsddp.agent import messages
from awsddp.agent.diagnosis.hang import diagnose
from awsddp.agent.diagnosis.stacks import DUMP, read_stacks
from awsddp.agent.messages import to_json_value
from awsddp.agent_client.calls import call_each_node
from awsddp.errors import AwsddpError
from awsddp.job.registry import JobRegistry
from awsddp.job.reported import find_job_on_nodes
from awsddp.model.documents import WhyDocument
from awsddp.model.node_answers import Stacks, read_answer
from awsddp.model.records import ACTIVE, JobRecord
from awsddp.session.connect import connect_reachable, preconnected_cluster
from awsddp.session.context import Session
from awsddp.storage.results_dir import make_job_result
from awsddp.storage.saved_job import is_s3_uri

STACKS_S = 8.0
"""The timeout for a node's answer; the node's own work takes at most 2 s."""


def why(session: Session, job: str | None = None) -> WhyDocument:
    """Return where each of a job's ranks is, and which ranks are behind. The default is the last started job.

    If the job is not running, the document's `result` describes how the job ended. The document then has the
    ranks' last stacks, if nodes wrote them. Raises NotFoundError or NodeError.
    """
    view = JobRegistry(session).find(job)
    if view is not None and (is_s3_uri(job) or view.job.state not in ACTIVE):
        return _make_ended_document(session, view.job, view.folder)
    with preconnected_cluster(session) as cluster, connect_reachable(cluster) as connected:
        name = None if job in (None, "last") else view.job.job if view else job
        record = find_job_on_nodes(connected, name, prefer_started=True)
        if record.state != "running":
            return _make_ended_document(session, record, session.results / record.job)
        request = messages.Stacks(job=record.job)
        answers = call_each_node(
            connected.fleet, dict.fromkeys(connected.fleet.nodes_of_job(record), request), timeout_s=STACKS_S
        )
        for answer in answers.values():
            if isinstance(answer, AwsddpError):
                session.say(answer.message)
        numbers = {node.instance_id: node.node for node in record.nodes}
        answers_by_number = {
            numbers[connected.fleet.endpoints[node].instance_id]: answer for node, answer in answers.items()
        }
    return _make_document(
        record, {node: answer for node, answer in answers_by_number.items() if isinstance(answer, Stacks)}
    )


def _make_ended_document(session: Session, job: JobRecord, folder: Path) -> WhyDocument:
    """Return the document for an ended job; `folder` has its results and its ranks' last stacks."""
    answers = {}
    for node in job.nodes:
        path = folder / f"node{node.node}" / "run" / DUMP
        with contextlib.suppress(OSError):
            answers[node.node] = read_answer(path.read_bytes(), Stacks, node=node.node)
    document = _make_document(job if answers else replace(job, ranks=()), answers, ended=False)
    if not answers:
        document.explanation = job.cause.explanation if job.cause else f"It is {job.state}."
    document.result = make_job_result(session, job, folder=folder)
    return document


def _make_document(job: JobRecord, answers: Mapping[int, Stacks], *, ended: bool = True) -> WhyDocument:
    """Return the document; with `ended`, ranks that have an exit code count as ended."""
    layout = [(rank.rank, rank.local_rank, rank.node) for rank in job.ranks]
    codes = {rank.rank: rank.exit_code for rank in job.ranks if ended and rank.exit_code is not None}
    stacks = {node: read_stacks(to_builtins(answer)) for node, answer in answers.items()}
    diagnosis = diagnose(layout, stacks, exit_codes=codes)
    described = {"job": job.job, "state": job.state, "hang": job.hang and to_builtins(job.hang)}
    return convert({**described, **to_json_value(diagnosis)}, WhyDocument)
