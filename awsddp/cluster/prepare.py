"""Prepare nodes: wait until they run, log in, prepare new ones, and set the expiry."""

from collections.abc import Sequence
from dataclasses import replace

from awsddp.cluster.reconcile import own_listing_or_empty
from awsddp.model.records import Node, PreparedNode
from awsddp.session.connect import CONNECT_S, connect, publish_addresses
from awsddp.session.context import LocatedCluster
from awsddp.settings.values import parse_idle
from awsddp.util.parallel import NodesFailed, import_in_thread


def prepare_nodes(cluster: LocatedCluster, *, has_hosts: bool = True) -> LocatedCluster:
    """Wait until all nodes run, prepare new nodes, and set the expiry on all nodes; return the cluster.

    The expiry tag is written last, so that a node with the new tag certainly has the new expiry. If
    `has_hosts` is False (the local cloud runs without hosts), the function does not log in to nodes.
    """
    from awsddp.aws.instances import check_still_running, wait_running
    from awsddp.aws.power import poweroff, tag_expiry
    from awsddp.aws.waits import deadline_s

    aws, record, idle = cluster.aws, cluster.record, cluster.session.spec.cluster.idle
    timeout_s = deadline_s([record.instance_type])
    if has_hosts:
        import_in_thread("awsddp.nodes.fleet")
    nodes = wait_running(aws, cluster.nodes, deadline_s=timeout_s, on_event=cluster.session.on_event)
    other_expiry = [node for node in nodes if node.expires != record.expires]
    cluster = replace(cluster, nodes=nodes, listing=replace(own_listing_or_empty(cluster), nodes=nodes))
    is_complete = {node.instance_id for node in record.prepared} == {node.instance_id for node in nodes}
    if is_complete and not other_expiry and record.idle == idle:
        cluster = publish_addresses(cluster)
        if has_hosts:
            _log_in(cluster)
        return cluster
    accept_host_keys(cluster, nodes)
    if has_hosts:
        from awsddp.nodes import provision

        with connect(
            cluster, deadline_s=timeout_s, on_wait=lambda: check_still_running(aws, nodes)
        ) as connected:
            prepared = provision.prepare(
                connected.fleet,
                nodes,
                expires_at=record.expires,
                idle_s=parse_idle(idle),
                gpus=0 if record.pretended else record.gpus_per_node,
            )
        cluster = connected.cluster
    else:
        prepared = tuple(
            PreparedNode(node=node.node, instance_id=node.instance_id, home="", python="", nic="")
            for node in nodes
        )
    if other_expiry:
        free = [node.instance_id for node in other_expiry if not node.unfetched and not node.spot]
        poweroff(aws, free, "terminate")
        tag_expiry(aws, other_expiry, record.expires)
    return cluster.update_record(
        prepared=prepared,
        addresses={node.instance_id: node.address for node in nodes if node.address},
        intent=None,
        idle=idle,
    )


def _log_in(cluster: LocatedCluster) -> None:
    """Log in to each node; all nodes are already prepared.

    Raises NodeError if a node was terminated or stopped in the meantime, or NodesFailed, with commands to
    repair the nodes.
    """
    from awsddp.aws.instances import check_still_running

    try:
        with connect(cluster, deadline_s=CONNECT_S):
            pass
    except NodesFailed as error:
        check_still_running(cluster.aws, cluster.nodes)
        layers = {getattr(failure, "layer", "") for failure in error.failures.values()}
        if layers <= {"refused", "banner"}:  # the machine responds, but its SSH server does not
            from awsddp.agent_client.node_checks import replace_command

            unresponsive = [node for node in cluster.nodes if node.node in error.failures]
            next_steps = [*map(replace_command, unresponsive)]
            if not any(node.spot for node in unresponsive):
                effect = "stops and starts the nodes: a job on them ends, but their disks are kept"
                next_steps.insert(0, f"awsddp stop && awsddp up   # {effect}")
            error.next = "\n".join(next_steps)
        raise


def accept_host_keys(cluster: LocatedCluster, nodes: Sequence[Node]) -> None:
    """Accept the last launch's temporary host key from its nodes whose own host keys are not known yet."""
    from awsddp.nodes import hostkeys

    if (intent := cluster.record.intent) is not None:
        known_hosts = hostkeys.load_keys(cluster.session.folder.known_hosts)
        without_key = [node.instance_id for node in nodes if node.instance_id not in known_hosts]
        hostkeys.add_keys(cluster.session.folder.known_hosts, dict.fromkeys(without_key, intent.host_key))
