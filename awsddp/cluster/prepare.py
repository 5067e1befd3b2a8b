"""Preparing nodes: wait for them, log in, prepare what is not prepared, set the expiry."""

from collections.abc import Sequence
from dataclasses import replace

from awsddp.cluster.reconcile import own_or_empty
from awsddp.model.records import Node, Prepared
from awsddp.session.connect import REACH_S, connect, publish
from awsddp.session.context import LocatedCluster
from awsddp.settings.values import idle_seconds
from awsddp.util.parallel import NodesFailed, import_soon


def prepare_nodes(cluster: LocatedCluster, *, hosts: bool = True) -> LocatedCluster:
    """Wait until all nodes run, prepare those that are not prepared, and set the expiry on all.

    The tag is written last: a node with the right tag has the expiry. Without `hosts` (the image says that
    nothing boots: a local cloud of records) there is nothing to prepare.
    """
    from awsddp.aws.instances import refuse_off, wait_running
    from awsddp.aws.power import poweroff, tag_expiry
    from awsddp.aws.waits import deadline_s

    aws, record, idle = cluster.aws, cluster.record, cluster.session.spec.cluster.idle
    term_s = deadline_s([record.instance_type])
    if hosts:
        import_soon("awsddp.nodes.fleet")
    nodes = wait_running(aws, cluster.nodes, deadline_s=term_s, on_event=cluster.session.on_event)
    late = [node for node in nodes if node.expires != record.expires]
    cluster = replace(cluster, nodes=nodes, listed=replace(own_or_empty(cluster), nodes=nodes))
    known = {one.instance_id for one in record.prepared} == {node.instance_id for node in nodes}
    if known and not late and record.idle == idle:
        cluster = publish(cluster)
        if hosts:
            _log_in(cluster)
        return cluster
    accept_host_keys(cluster, nodes)
    if hosts:
        from awsddp.nodes import provision

        with connect(cluster, deadline_s=term_s, meanwhile=lambda: refuse_off(aws, nodes)) as connected:
            prepared = provision.prepare(
                connected.fleet,
                nodes,
                expires_at=record.expires,
                idle_s=idle_seconds(idle),
                gpus=0 if record.pretended else record.gpus_per_node,
            )
        cluster = connected.cluster
    else:
        prepared = tuple(
            Prepared(node=node.node, instance_id=node.instance_id, home="", python="", nic="")
            for node in nodes
        )
    if late:
        free = [node.instance_id for node in late if not node.unfetched and not node.spot]
        poweroff(aws, free, "terminate")
        tag_expiry(aws, late, record.expires)
    return cluster.remember(
        prepared=prepared,
        addresses={node.instance_id: node.address for node in nodes if node.address},
        intent=None,
        idle=idle,
    )


def _log_in(cluster: LocatedCluster) -> None:
    """Log in to each node, which was ready before.

    Raises NodeError for one that was ended or stopped meanwhile, NodesFailed with the commands that repair.
    """
    from awsddp.aws.instances import refuse_off

    try:
        with connect(cluster, deadline_s=REACH_S):
            pass
    except NodesFailed as error:
        refuse_off(cluster.aws, cluster.nodes)
        layers = {getattr(one, "layer", "") for one in error.failures.values()}
        if layers <= {"refused", "banner"}:  # the machines are there, what answers on them is not
            from awsddp.agent_client.node_checks import replacement

            silent = [node for node in cluster.nodes if node.node in error.failures]
            ways = [*map(replacement, silent)]
            if not any(node.spot for node in silent):
                boots = "boots the nodes anew: a job on them ends, their disks stay"
                ways.insert(0, f"awsddp stop && awsddp up   # {boots}")
            error.next = "\n".join(ways)
        raise


def accept_host_keys(cluster: LocatedCluster, nodes: Sequence[Node]) -> None:
    """Accept the temporary host key of the last launch from its nodes, which have no other yet."""
    from awsddp.nodes import hostkeys

    if (intent := cluster.record.intent) is not None:
        known = hostkeys.read(cluster.session.folder.known_hosts)
        new = [node.instance_id for node in nodes if node.instance_id not in known]
        hostkeys.accept(cluster.session.folder.known_hosts, dict.fromkeys(new, intent.host_key))
