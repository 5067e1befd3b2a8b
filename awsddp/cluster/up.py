"""up: launch a cluster, or finish, repair or resize an existing one."""

from dataclasses import replace
from typing import TYPE_CHECKING

from awsddp.cluster.launch import launch, plan_everywhere
from awsddp.cluster.plan import must_reconcile, read_facts_and_cluster
from awsddp.cluster.prepare import accept_host_keys, prepare_nodes
from awsddp.cluster.reconcile import Confirm, own_listing_or_empty, reconcile
from awsddp.cluster.replaced_nodes import report_jobs_without_replaced_nodes
from awsddp.errors import ConfigError
from awsddp.job.environment import ensure_environment
from awsddp.nodes import rsync
from awsddp.plan.environment import check_identical_nodes
from awsddp.plan.launch_plan import check_untried_features
from awsddp.plan.records import Facts, LaunchPlan
from awsddp.session.connect import check_jump_host, connect, publish_addresses
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.locate import open_target, refresh_listing, terminate, wait_until_listed
from awsddp.settings.loader import settings_to_record

if TYPE_CHECKING:
    from awsddp.model.documents import ClusterDocument


def up(session: Session, *, confirm: Confirm) -> "ClusterDocument":
    """Launch the cluster, or change an existing one to match the spec, and return the `up` document.

    `confirm` is called with the plan before a launch. If instances are only started or terminated, `confirm`
    is called with a question instead. To refuse, `confirm` raises an exception. Raises ConfigError,
    CloudError, CapacityError, NodeError or LeftoverError. The next `up` continues where the failed call
    stopped.
    """
    with session.folder.lock("up"), open_target(session, record := session.folder.read()) as target:
        facts, cluster = read_facts_and_cluster(session, target, record)
        hosts = facts.image.has_hosts

        def check_and_confirm(change: LaunchPlan | str) -> None:
            if isinstance(change, LaunchPlan):
                check_untried_features(change)
            if hosts:
                rsync.find_rsync()  # fail before anything costs money
                check_jump_host(cluster.session)
            confirm(change)

        launched = prepare_nodes(_launch_missing(cluster, facts, check_and_confirm), has_hosts=hosts)
        from awsddp.cluster.status import (  # imported late: not needed before there are nodes
            make_cluster_document,
            refresh_jobs,
        )

        if not hosts:
            return make_cluster_document(_terminate_others(launched))
        launched = build_environment(launched)
        report_jobs_without_replaced_nodes(launched)
        return make_cluster_document(*refresh_jobs(publish_addresses(_terminate_others(launched))))


def build_environment(cluster: LocatedCluster) -> LocatedCluster:
    """Build the environment of [env] on the nodes, record it for later jobs, and return the cluster.

    Raises ConfigError, and NodeError, for example if the nodes differ in torch, CUDA, driver or GPUs.
    """
    from awsddp.nodes.project_files import list_project_files
    from awsddp.nodes.sync import push

    session, record = cluster.session, cluster.record
    check_identical_nodes(
        {
            node.node: {"torch": node.torch, "CUDA": node.cuda, "driver": node.driver, "GPUs": node.gpus}
            for node in record.prepared
        }
    )
    requested = settings_to_record(session.job_spec)
    if not requested:
        return cluster
    with connect(cluster.update_record(asked=record.asked | requested)) as connected:
        connected, _ = ensure_environment(
            connected,
            send_files=lambda: push(
                list_project_files(session.job_spec, awsddp_home=session.home, on_event=session.on_event),
                connected.fleet,
                on_event=session.on_event,
            ),
        )
    return connected.cluster


def _launch_missing(cluster: LocatedCluster, facts: Facts, confirm: Confirm) -> LocatedCluster:
    """Launch the missing nodes; return the cluster with existing, resumed and new nodes."""
    cluster = _finish_launch(cluster)
    if must_reconcile(cluster):
        return reconcile(cluster, facts, confirm)
    plan = plan_everywhere(cluster, facts)
    confirm(plan)
    for listed in cluster.all_listings:
        if cluster.local_record is None or listed.id != cluster.local_record.id:
            terminate(cluster, listed)
    return launch(cluster, plan)


def _finish_launch(cluster: LocatedCluster) -> LocatedCluster:
    """Finish an interrupted launch, or wait until AWS lists the prepared instances; return the cluster.

    Accepts the interrupted launch's temporary host key, because the next launch has another key.
    """
    from awsddp.aws.instances import launched_numbers, resume_launch, wait_running

    record = cluster.local_record
    if record is None:
        return cluster
    if record.intent is None:
        return wait_until_listed(cluster)
    own_listing = own_listing_or_empty(cluster)
    expected = launched_numbers(record.intent)
    nodes = tuple(node for node in own_listing.live if node.node in expected)
    if {node.node for node in nodes} != expected or any(node.is_renumbered for node in nodes):
        resumed = resume_launch(cluster.aws, record.intent, on_event=cluster.session.on_event)
        if not resumed:
            return cluster.update_record(intent=None)
        instance_ids = [node.instance_id for node in resumed]
        nodes = wait_running(cluster.aws, resumed, on_event=cluster.session.on_event)
        listed = (node for node in own_listing.nodes if node.instance_id not in instance_ids)
        own_listing = replace(own_listing, nodes=tuple(sorted((*nodes, *listed), key=lambda node: node.node)))
    accept_host_keys(cluster, nodes)
    other_listings = tuple(listing for listing in cluster.all_listings if listing.id != record.id)
    return replace(cluster, listing=own_listing, other_listings=other_listings)


def _terminate_others(cluster: LocatedCluster) -> LocatedCluster:
    """Refresh the listing, and terminate other clusters with this name.

    Two machines may launch at the same time, before AWS lists the other machine's cluster. Both machines then
    keep the cluster that was created first. Raises ConfigError if this machine's cluster was terminated.
    """
    record, cluster = cluster.record, refresh_listing(cluster)
    own_listing = cluster.own_listing
    cluster = replace(cluster, listing=own_listing)
    live = [listing for listing in cluster.all_listings if listing.live]
    if own_listing is None or not own_listing.live or len(live) == 1:
        return cluster
    first, *later = sorted(live, key=lambda listing: (listing.created or record.created, listing.id))
    for other in later:
        nodes = ", ".join(node.instance_id for node in other.live)
        cluster.session.say(
            f"a second cluster {other.name} ({other.id}) was created at the same time: terminating {nodes}"
        )
        terminate(cluster, other)
    if first.id == record.id:
        return cluster
    cluster.session.folder.archive(record.id)
    remaining = ", ".join(node.instance_id for node in first.live)
    raise ConfigError(
        f"another machine created cluster {own_listing.name} just before this machine",
        f"that machine's nodes stay: {remaining}; the nodes of this machine were terminated",
        f"continue on that machine; or awsddp -c {own_listing.name}-2 up   # another name",
    )
