"""What belongs to nodes, in their order."""

from collections.abc import Mapping

from awsddp.model.documents import NodeFiles


def in_order(files: Mapping[int, NodeFiles]) -> tuple[NodeFiles, ...]:
    """Return what was sent to each node, or fetched from it, by the nodes' numbers."""
    return tuple(one for _, one in sorted(files.items()))
