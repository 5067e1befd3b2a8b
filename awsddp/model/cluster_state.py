"""Derive a cluster's state."""

from awsddp.model.records import ClusterListing, ClusterState


def cluster_state(
    cluster: ClusterListing | None,
    *,
    prepared: frozenset[str] | None,
    launching: bool,
    size: int | None = None,
) -> ClusterState:
    """Return a cluster's state, derived from its nodes' states.

    `prepared` has the ids of the instances that this machine's record lists as prepared (None: there is no
    record). `launching` is True if a launch was recorded and has not returned. `size` is the requested number
    of nodes (None: unknown): lost nodes beyond this number are ignored, because the cluster has become
    smaller.
    """
    states = {node.state for node in cluster.live} if cluster else set()
    if cluster is None or not states:
        if launching:
            return "launching"
        ending = cluster is not None and any(node.state == "shutting-down" for node in cluster.nodes)
        return "ending" if ending or (cluster and cluster.leftovers) else "absent"
    if states <= {"stopped", "stopping"}:
        return "stopped"
    expected = {node.node for node in cluster.nodes if size is None or node.node < size}
    if expected - {node.node for node in cluster.live} or states - {"pending", "running"}:
        return "partial"
    if "pending" in states:
        return "launching"
    ready = prepared is None or {node.instance_id for node in cluster.live} <= prepared
    return "ready" if ready else "preparing"
