"""stop: end the jobs, stop the instances, keep their disks."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from awsddp.cluster.status import cluster_document
from awsddp.errors import AwsddpError, ConfigError
from awsddp.job.cancel import end_job
from awsddp.job.fetch import Ephemeral, refuse_ephemeral
from awsddp.model.documents import ClusterDocument
from awsddp.model.records import Listed
from awsddp.session.connect import reachable, told_jobs
from awsddp.session.locate import look, machines, require_live
from awsddp.storage.results_dir import is_owed
from awsddp.util.format import node_name

if TYPE_CHECKING:
    from awsddp.session.context import Cluster

STOP_REACH_S = 30.0


def stop(cluster: "Cluster", *, confirm: Callable[[str], None]) -> ClusterDocument:
    """Stop the cluster's instances and return it as the `status` document.

    A running job is ended first, with its grace; results stay on the disks. `confirm` is called first and
    raises to refuse. Raises NotFoundError, ConfigError for spot nodes, which cannot be stopped, CloudError,
    and NodeError for instances that do not stop and for results that a stop would lose.
    """
    from awsddp.aws.power import stop as stop_nodes

    with cluster.folder.lock("stop"), cluster.find() as cluster:
        listed = require_live(cluster)
        _refuse_spot(listed)
        going = [node for node in listed.live if node.state != "stopped"]
        if going:
            confirm(_what_stops(cluster, listed))
            _end_jobs(cluster, listed)
            stop_nodes(cluster.aws, going, on_event=cluster.on_event)
            if cluster.known is not None:
                cluster.folder.note(
                    "stopped", id=listed.id, instances=sorted(node.instance_id for node in going)
                )
                cluster.folder.publish(lambda *_: "")
        look(cluster)
        return cluster_document(cluster)


def _refuse_spot(cluster: Listed) -> None:
    spot = [node_name(node.node) for node in cluster.live if node.spot]
    if spot:
        raise ConfigError(
            f"{', '.join(spot)}: spot instances cannot be stopped",
            "AWS can only terminate one-time spot instances",
            "awsddp down   # fetch the results, then terminate them",
        )


def _what_stops(cluster: "Cluster", listed: Listed) -> str:
    cost = "" if cluster.target.name == "local" else ", and cost"
    what = f"Cluster {listed.name}: {machines(cluster, listed)}"
    question = f"{what} will be stopped; their disks are kept{cost}."
    if listed.unfetched:
        question += f"\nThe results of {', '.join(listed.unfetched)} stay on the disks."
    return question


def _end_jobs(cluster: "Cluster", listed: Listed) -> None:
    """End the running jobs, with their grace. Unreachable nodes are stopped anyway: their disks are kept."""
    if cluster.known is None or not listed.unfetched:
        return
    try:
        with cluster.connect(reachable(listed.live), deadline_s=STOP_REACH_S, partial=True):
            jobs = told_jobs(cluster, partial=True)
            refuse_ephemeral(cluster, [job for job in jobs if is_owed(cluster, listed.unfetched, job)])
            # The newest first: the end of a job starts one that waits for it.
            cluster.folder.remember(*[end_job(cluster, job) for job in reversed(jobs)])
    except Ephemeral:
        raise
    except AwsddpError as error:
        cluster.say(f"jobs could not be ended first: {error.message}")
