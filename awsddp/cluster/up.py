"""up: launch a cluster, or finish, repair or resize an existing one."""

from dataclasses import replace
from typing import TYPE_CHECKING

from awsddp.cluster.launch import launch, plan_everywhere
from awsddp.cluster.plan import read_all, to_reconcile
from awsddp.cluster.prepare import accept_host_keys, prepare_nodes
from awsddp.cluster.reconcile import Confirm, own_or_empty, reconcile
from awsddp.cluster.replaced_nodes import name_left_out
from awsddp.errors import ConfigError
from awsddp.job.environment import ensure_environment
from awsddp.nodes import rsync
from awsddp.plan.environment import refuse_unlike
from awsddp.plan.launch_plan import refuse_untried
from awsddp.plan.records import Facts, LaunchPlan
from awsddp.session.connect import connect, publish, reach_jump
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.locate import end, look, target_for, wait_until_listed
from awsddp.settings.loader import remembered

if TYPE_CHECKING:
    from awsddp.model.documents import ClusterDocument


def up(session: Session, *, confirm: Confirm) -> "ClusterDocument":
    """Launch the cluster, or change an existing one to match the spec, and return the `up` document.

    `confirm` is called with the plan before a launch, with a sentence before instances are only started or
    terminated, and raises to refuse. Raises ConfigError, CloudError, CapacityError, NodeError or
    LeftoverError; run again, `up` continues where it stopped.
    """
    with session.folder.lock("up"), target_for(session, record := session.folder.read()) as target:
        facts, cluster = read_all(session, target, record)
        hosts = facts.image.has_hosts

        def check_and_confirm(change: LaunchPlan | str) -> None:
            if isinstance(change, LaunchPlan):
                refuse_untried(change)
            if hosts:
                rsync.program()  # before anything costs money
                reach_jump(cluster.session)
            confirm(change)

        launched = prepare_nodes(_launch_missing(cluster, facts, check_and_confirm), hosts=hosts)
        from awsddp.cluster.status import cluster_document, refresh  # not needed before there are nodes

        if not hosts:
            return cluster_document(_terminate_others(launched))
        launched = make_environment(launched)
        name_left_out(launched)
        return cluster_document(*refresh(publish(_terminate_others(launched))))


def make_environment(cluster: LocatedCluster) -> LocatedCluster:
    """Build the environment of [env] on the nodes, and record it for later jobs; return the cluster.

    Raises ConfigError, NodeError also if the nodes differ in torch, CUDA, driver or GPUs.
    """
    from awsddp.nodes.project_files import project_files
    from awsddp.nodes.sync import push

    session, record = cluster.session, cluster.record
    refuse_unlike(
        {
            node.node: {"torch": node.torch, "CUDA": node.cuda, "driver": node.driver, "GPUs": node.gpus}
            for node in record.prepared
        }
    )
    requested = remembered(session.job_spec)
    if not requested:
        return cluster
    with connect(cluster.remember(asked=record.asked | requested)) as connected:
        connected, _ = ensure_environment(
            connected,
            send_files=lambda: push(
                project_files(session.job_spec, home=session.home, on_event=session.on_event),
                connected.fleet,
                on_event=session.on_event,
            ),
        )
    return connected.cluster


def _launch_missing(cluster: LocatedCluster, facts: Facts, confirm: Confirm) -> LocatedCluster:
    """Launch the missing nodes; return the cluster with existing, resumed and new nodes."""
    cluster = _finish_launch(cluster)
    if to_reconcile(cluster):
        return reconcile(cluster, facts, confirm)
    plan = plan_everywhere(cluster, facts)
    confirm(plan)
    for listed in cluster.all_listed:
        if cluster.known is None or listed.id != cluster.known.id:
            end(cluster, listed)
    return launch(cluster, plan)


def _finish_launch(cluster: LocatedCluster) -> LocatedCluster:
    """Finish an interrupted launch, or wait until AWS lists the prepared instances; return the cluster.

    Accepts the temporary host key of the interrupted launch: the next launch has another one.
    """
    from awsddp.aws.instances import filled_by, resume, wait_running

    record = cluster.known
    if record is None:
        return cluster
    if record.intent is None:
        return wait_until_listed(cluster)
    own_listing = own_or_empty(cluster)
    expected = filled_by(record.intent)
    nodes = tuple(node for node in own_listing.live if node.node in expected)
    if {node.node for node in nodes} != expected or any(node.is_renumbered for node in nodes):
        resumed = resume(cluster.aws, record.intent, on_event=cluster.session.on_event)
        if not resumed:
            return cluster.remember(intent=None)
        instance_ids = [node.instance_id for node in resumed]
        nodes = wait_running(cluster.aws, resumed, on_event=cluster.session.on_event)
        listed = (node for node in own_listing.nodes if node.instance_id not in instance_ids)
        own_listing = replace(own_listing, nodes=tuple(sorted((*nodes, *listed), key=lambda node: node.node)))
    accept_host_keys(cluster, nodes)
    other_listings = tuple(listing for listing in cluster.all_listed if listing.id != record.id)
    return replace(cluster, listed=own_listing, others=other_listings)


def _terminate_others(cluster: LocatedCluster) -> LocatedCluster:
    """Refresh the listing, and terminate other clusters of this name.

    Two machines may launch at the same time, before AWS lists the other cluster. Both keep the cluster that
    was created first. Raises ConfigError if this machine's cluster was terminated.
    """
    record, cluster = cluster.record, look(cluster)
    own_listing = cluster.own
    cluster = replace(cluster, listed=own_listing)
    live = [listing for listing in cluster.all_listed if listing.live]
    if own_listing is None or not own_listing.live or len(live) == 1:
        return cluster
    first, *later = sorted(live, key=lambda listing: (listing.created or record.created, listing.id))
    for other in later:
        nodes = ", ".join(node.instance_id for node in other.live)
        cluster.session.say(
            f"a second cluster {other.name} ({other.id}) was made at the same time: ending {nodes}"
        )
        end(cluster, other)
    if first.id == record.id:
        return cluster
    cluster.session.folder.retire(record.id)
    remaining = ", ".join(node.instance_id for node in first.live)
    raise ConfigError(
        f"another machine made cluster {own_listing.name} a moment before",
        f"its nodes stay: {remaining}; those of this machine were terminated",
        f"continue on that machine; or awsddp -c {own_listing.name}-2 up   # another name",
    )
