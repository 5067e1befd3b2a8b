"""Errors of nodes: their message and next step."""

from typing import get_args

import pytest

from awsddp.errors import ConfigError
from awsddp.nodes.node_failures import Layer, NodeFailure, find_program


@pytest.mark.parametrize("layer", get_args(Layer))
def test_failure_of_each_layer_names_its_node_and_the_next_step(layer: Layer) -> None:
    failure = NodeFailure(3, layer, "no answer")
    assert (failure.message, failure.node, failure.layer) == ("node3: no answer", 3, layer)
    assert failure.next
    assert NodeFailure(3, layer, "no answer", next_step="awsddp why").next == "awsddp why"


def test_missing_program_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match="no-such-program not found on this machine") as error:
        find_program("no-such-program", "awsddp copies files with it", "apt-get install it")
    assert (error.value.why, error.value.next) == ("awsddp copies files with it", "apt-get install it")
