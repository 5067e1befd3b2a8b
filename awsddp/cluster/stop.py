"""stop: end the jobs and stop the instances, whose disks are kept."""

from collections.abc import Callable

from awsddp.cluster.status import make_cluster_document
from awsddp.errors import AwsddpError, ConfigError
from awsddp.job.cancel import end_job
from awsddp.job.fetch import Ephemeral, refuse_ephemeral_results
from awsddp.model.documents import ClusterDocument
from awsddp.model.records import ClusterListing
from awsddp.session.connect import connect, filter_reachable, list_jobs_on_nodes
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.locate import describe_nodes, find_cluster, refresh_listing, require_live
from awsddp.storage.results_dir import has_unfetched_results
from awsddp.util.formatting import node_name

STOP_REACH_S = 30.0


def stop(session: Session, *, confirm: Callable[[str], None]) -> ClusterDocument:
    """Stop the cluster's instances and return the `status` document.

    Running jobs are ended first, after their grace period. Results stay on the disks. `confirm` is called
    before anything changes, and raises an exception to refuse. Raises NotFoundError, CloudError, ConfigError
    for spot nodes, which cannot be stopped, and NodeError if an instance does not stop or results would be
    lost.
    """
    from awsddp.aws.power import stop as stop_nodes

    with session.folder.lock("stop"), find_cluster(session) as cluster:
        cluster, listed = require_live(cluster)
        _refuse_spot(listed)
        to_stop = [node for node in listed.live if node.state != "stopped"]
        if to_stop:
            confirm(_question(cluster, listed))
            _end_jobs(cluster, listed)
            stop_nodes(cluster.aws, to_stop, on_event=session.on_event)
            if cluster.local_record is not None:
                session.folder.append_event(
                    "stopped", id=listed.id, instances=sorted(node.instance_id for node in to_stop)
                )
                session.folder.write_ssh_config(lambda *_: "")
                session.folder.end_runs("stop")
        return make_cluster_document(refresh_listing(cluster))


def _refuse_spot(cluster: ClusterListing) -> None:
    spot = [node_name(node.node) for node in cluster.live if node.spot]
    if spot:
        raise ConfigError(
            f"{', '.join(spot)}: spot instances cannot be stopped",
            "AWS can only terminate one-time spot instances",
            "awsddp down   # fetch the results, then terminate them",
        )


def _question(cluster: LocatedCluster, listed: ClusterListing) -> str:
    cost = "" if cluster.target.name == "local" else ", and cost money"
    subject = f"Cluster {listed.name}: {describe_nodes(cluster, listed)}"
    question = f"{subject} will be stopped; their disks are kept{cost}."
    if listed.unfetched:
        question += f"\nThe results of {', '.join(listed.unfetched)} stay on the disks."
    return question


def _end_jobs(cluster: LocatedCluster, listed: ClusterListing) -> None:
    """End the jobs, after their grace period. Unreachable nodes are stopped anyway: their disks are kept."""
    session = cluster.session
    if cluster.local_record is None or not listed.unfetched:
        return
    try:
        with connect(
            cluster, filter_reachable(listed.live), deadline_s=STOP_REACH_S, partial=True
        ) as connected:
            jobs = list_jobs_on_nodes(connected, partial=True)
            refuse_ephemeral_results(
                connected, [job for job in jobs if has_unfetched_results(session, listed.unfetched, job)]
            )
            # End the newest job first, because the end of a job starts the job that waits for it.
            session.folder.save_jobs(*[end_job(connected, job) for job in reversed(jobs)])
    except Ephemeral:
        raise
    except AwsddpError as error:
        session.say(f"jobs could not be ended first: {error.message}")
