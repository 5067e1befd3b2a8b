"""Calls on several nodes in parallel: their failures become one error."""

import pytest

from awsddp.nodes.node_failures import NodeFailure
from awsddp.util.parallel import NodesFailed, results_or_raise


def test_nodes_with_the_same_failure_share_a_line() -> None:
    same = {node: NodeFailure(node, "command", "no numpy", "ERROR: none\nfound") for node in (3, 0)}
    with pytest.raises(NodesFailed) as caught:
        results_or_raise({1: "result", **same, 2: NodeFailure(2, "lost", "no answer")})
    assert caught.value.message == "3 of 4 nodes failed"
    assert caught.value.why == "node0, node3: no numpy (ERROR: none; found)\nnode2: no answer"
