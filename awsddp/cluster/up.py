"""up: plan, confirm, launch. An existing cluster is finished, repaired or resized, or stays unchanged."""

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

        def ask(what: LaunchPlan | str) -> None:
            if isinstance(what, LaunchPlan):
                refuse_untried(what)
            if hosts:
                rsync.program()  # before anything costs money
                reach_jump(cluster.session)
            confirm(what)

        launched = prepare_nodes(_launch_missing(cluster, facts, ask), hosts=hosts)
        from awsddp.cluster.status import cluster_document, refresh  # not needed before there are nodes

        if not hosts:
            return cluster_document(_end_others(launched))
        launched = make_environment(launched)
        name_left_out(launched)
        return cluster_document(*refresh(publish(_end_others(launched))))


def make_environment(cluster: LocatedCluster) -> LocatedCluster:
    """Build the environment of [env] on the nodes, and remember it for later jobs.

    Raises ConfigError, NodeError also where the nodes differ in torch, CUDA, driver or GPUs.
    """
    from awsddp.nodes.project_files import project_files
    from awsddp.nodes.sync import push

    session, record = cluster.session, cluster.record
    refuse_unlike(
        {
            one.node: {"torch": one.torch, "CUDA": one.cuda, "driver": one.driver, "GPUs": one.gpus}
            for one in record.prepared
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
    """Return the cluster with its nodes: those that stay, those of an interrupted launch, and new ones."""
    cluster = _finish_launch(cluster)
    if to_reconcile(cluster):
        return reconcile(cluster, facts, confirm)
    plan = plan_everywhere(cluster, facts)
    confirm(plan)
    for left in cluster.all_listed:
        if cluster.known is None or left.id != cluster.known.id:
            end(cluster, left)
    return launch(cluster, plan)


def _finish_launch(cluster: LocatedCluster) -> LocatedCluster:
    """Finish an interrupted launch, or wait until AWS lists the instances that this machine knows.

    The temporary host key of such a launch is accepted here: the next launch has its own.
    """
    from awsddp.aws.instances import filled_by, resume, wait_running

    record = cluster.known
    if record is None:
        return cluster
    if record.intent is None:
        return wait_until_listed(cluster)
    own = own_or_empty(cluster)
    filled = filled_by(record.intent)
    nodes = tuple(node for node in own.live if node.node in filled)
    if {node.node for node in nodes} != filled or any(node.is_renumbered for node in nodes):
        resumed = resume(cluster.aws, record.intent, on_event=cluster.session.on_event)
        if not resumed:
            return cluster.remember(intent=None)
        keys = [node.instance_id for node in resumed]
        nodes = wait_running(cluster.aws, resumed, on_event=cluster.session.on_event)
        listed = (node for node in own.nodes if node.instance_id not in keys)
        own = replace(own, nodes=tuple(sorted((*nodes, *listed), key=lambda node: node.node)))
    accept_host_keys(cluster, nodes)
    others = tuple(one for one in cluster.all_listed if one.id != record.id)
    return replace(cluster, listed=own, others=others)


def _end_others(cluster: LocatedCluster) -> LocatedCluster:
    """Look again, and end other clusters of this name.

    Two machines may have launched at once, neither seeing the other's. Both keep the same one, the first,
    and end the other. Raises ConfigError where this machine's was ended.
    """
    record, cluster = cluster.record, look(cluster)
    own = cluster.own
    cluster = replace(cluster, listed=own)
    live = [one for one in cluster.all_listed if one.live]
    if own is None or not own.live or len(live) == 1:
        return cluster
    first, *others = sorted(live, key=lambda one: (one.created or record.created, one.id))
    for other in others:
        nodes = ", ".join(node.instance_id for node in other.live)
        cluster.session.say(
            f"a second cluster {other.name} ({other.id}) was made at the same time: ending {nodes}"
        )
        end(cluster, other)
    if first.id == record.id:
        return cluster
    cluster.session.folder.retire(record.id)
    raise ConfigError(
        f"another machine made cluster {own.name} a moment before",
        f"its nodes stay: {', '.join(node.instance_id for node in first.live)}; those made here were ended",
        f"continue there; or awsddp -c {own.name}-2 up   # another name here",
    )
