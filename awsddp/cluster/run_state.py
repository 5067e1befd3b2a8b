"""Observe a run for its recovery: its jobs, its cluster's nodes, and which of them failed."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

from awsddp.agent.diagnosis.job_causes import NODE_FAULTS, cause_of_kind
from awsddp.agent_client.node_checks import find_failed_nodes, find_reclaimed_nodes, probe_nodes
from awsddp.errors import AwsddpError
from awsddp.job.lives import list_lives
from awsddp.job.registry import JobView
from awsddp.model.records import ACTIVE, Cause, JobRecord, Node
from awsddp.plan.recovery import COLLECTIVE_CAUSES, Life, Situation
from awsddp.session.connect import (
    connect_reachable,
    filter_reachable,
    list_jobs_on_nodes,
    preconnected_cluster,
)
from awsddp.session.context import LocatedCluster, Session
from awsddp.state import ClusterHistory
from awsddp.storage.results_dir import has_unfetched_results, is_fetched
from awsddp.util.formatting import optional_utc

_DOOMED_CAUSES = (*NODE_FAULTS, "spot_interruption", "instance_retired")
"""The causes whose node is replaced even if it still runs."""


class RunState(NamedTuple):
    """A run's jobs, oldest first, the living nodes of its cluster, and what decides on the next step."""

    lives: list[JobView]
    nodes: tuple[Node, ...]
    situation: Situation

    @property
    def last(self) -> JobView:
        """The last job."""
        return self.lives[-1]


@dataclass(frozen=True)
class _Reports:
    """What the reachable nodes report: their jobs, and the ids of the instances that EC2 is about to reclaim
    and of those whose GPUs failed. `silent` are running instances that cannot be reached."""

    jobs: tuple[JobRecord, ...] = ()
    reclaimed: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()


def observe_run(session: Session, job: JobRecord, *, nodes: int | None = None) -> RunState:
    """Return the state of a job's run, as its nodes, EC2 and this machine's files report it.

    `nodes` is the requested number of nodes (None: the cluster's size). Raises CloudError or ConfigError.
    """
    with preconnected_cluster(session) as cluster:
        live = cluster.own_listing.live if cluster.own_listing is not None else ()
        reports = _query_nodes(cluster, job, live)
        lives = list_lives(session, job, reports.jobs)
        lives[-1] = _settle(cluster, lives[-1], live)
        situation = _make_situation(cluster, lives, live, reports)
        needed = nodes or _find_size(cluster, lives[-1])
        running = {node.node for node in live if node.state == "running" and cluster.record.is_prepared(node)}
        return RunState(
            lives,
            live,
            replace(
                situation,
                nodes=needed,
                min_nodes=session.job_spec.job.min_nodes(needed),
                is_ready=set(range(needed)) <= running,
            ),
        )


def _query_nodes(cluster: LocatedCluster, job: JobRecord, live: Sequence[Node]) -> _Reports:
    """Return the reports of the nodes that can be reached."""
    if cluster.local_record is None or not filter_reachable(live):
        return _Reports()
    session, ids = cluster.session, {node.node: node.instance_id for node in live}
    with contextlib.suppress(AwsddpError), connect_reachable(cluster) as connected:
        jobs = list_jobs_on_nodes(connected, partial=True)
        session.folder.save_jobs(*jobs)
        last = list_lives(session, job, jobs)[-1].job
        probes = probe_nodes(
            connected.fleet,
            [node for node in connected.cluster.nodes if node.node in connected.fleet.nodes],
            cluster.record.prepared_by_node,
            thorough=last.cause is not None and last.cause.kind in COLLECTIVE_CAUSES,
        )
        return _Reports(
            jobs=jobs,
            reclaimed=frozenset(ids[node] for node in find_reclaimed_nodes(probes)),
            failed=frozenset(ids[node] for node in find_failed_nodes(probes)),
            silent=frozenset(ids[node] for node in ids.keys() & connected.fleet.failures.keys()),
        )
    return _Reports(silent=frozenset(ids.values()))


def _settle(cluster: LocatedCluster, view: JobView, live: Sequence[Node]) -> JobView:
    """Return the job, marked as interrupted if it was last seen active and none of its instances runs."""
    from awsddp.aws.clusters import find_end_cause

    running = {node.instance_id for node in live if node.state in ("pending", "running")}
    instances = {node.instance_id for node in view.job.nodes}
    if view.job.state not in ACTIVE or instances & running:
        return view
    listed = cluster.listing.nodes if cluster.listing is not None else ()
    gone = next((node for node in listed if node.instance_id in instances), None)
    kind, why = (
        find_end_cause(gone) if gone is not None else ("node_lost", "EC2 no longer lists its instances")
    )
    row = cause_of_kind(kind, why=f"all nodes of the job are gone ({why})", job=view.job.job)
    cause = Cause(**row._replace(values={}, instance_id=gone.instance_id if gone else None)._asdict())
    ended = gone.changed if gone is not None else None
    job = replace(view.job, state="interrupted", cause=cause, ended=optional_utc(ended), progress=())
    cluster.session.folder.save_jobs(job)
    return replace(view, job=job)


def _make_situation(
    cluster: LocatedCluster, lives: Sequence[JobView], live: Sequence[Node], reports: _Reports
) -> Situation:
    """Return the situation, except for the fields that depend on the requested number of nodes."""
    from awsddp.aws.instances import list_impaired

    session, last = cluster.session, lives[-1].job
    requested, cause = session.job_spec.job, last.cause
    running = {node.instance_id for node in live if node.state == "running"}
    instances = {node.instance_id for node in last.nodes}
    impaired = list_impaired(cluster.aws, live) if live else frozenset()
    doomed = {cause.instance_id} if cause is not None and cause.kind in _DOOMED_CAUSES else set()
    faulty = running & {*doomed, *reports.reclaimed, *reports.failed, *impaired}
    names = {view.job.job for view in lives}
    unfetched = [job for node in filter_reachable(live) for job in node.unfetched]
    # The results of a job that succeeded must be on this machine, even if they are all in S3.
    is_needed_here = last.state == "succeeded" and not is_fetched(session.results / last.job, last)
    is_needed_here &= bool(instances & running) or last.saving is not None
    return Situation(
        lives=[
            Life(
                job=view.job.job,
                state=view.job.state,
                cause=view.job.cause,
                has_begun=view.job.started is not None,
            )
            for view in lives
        ],
        limit=requested.recover or 1,
        exit_codes=requested.recover_on,
        failed=frozenset(instances - running | instances & {*faulty, *reports.silent}),
        faulty=frozenset(str(instance) for instance in faulty),
        is_fetched=not has_unfetched_results(session, unfetched, last) and not is_needed_here,
        living=tuple(sorted(node.node for node in live)),
        shares_nodes=any(job.state in ACTIVE and job.job not in names for job in reports.jobs),
        left_s=_find_time_left(cluster, lives[-1].history),
        waits=session.spec.capacity.retry_until_up,
    )


def _find_size(cluster: LocatedCluster, view: JobView) -> int:
    """Return the requested size of the run's cluster, also if the cluster was terminated."""
    if cluster.local_record is not None:
        return cluster.local_record.nodes
    sizes = [row.nodes for row in view.history.rows if row.nodes] if view.history is not None else []
    return sizes[-1] if sizes else len(view.job.nodes)


def _find_time_left(cluster: LocatedCluster, history: ClusterHistory | None) -> float:
    """Return the time until the cluster's expiry (s), also if the cluster was terminated."""
    rows = history.rows if history is not None else ()
    recorded = [row.expires for row in rows if row.expires is not None]
    if cluster.local_record is not None:
        recorded.append(cluster.local_record.expires)
    return (recorded[-1] - datetime.now(UTC)).total_seconds() if recorded else float("inf")
