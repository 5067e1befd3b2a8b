"""The stacks of all ranks of a fleet, as `awsddp why` shows them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from awsddp.agent import messages
from awsddp.agent.diagnosis.hang import diagnose
from awsddp.agent.diagnosis.stacks import read_stacks
from awsddp.agent.messages import to_json_value
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def diagnose_fleet(fleet: "Fleet", job: str = "job") -> dict[str, Any]:
    """Request the stacks of all nodes and diagnose the hang, as `why` does."""
    answers = {
        node: read_stacks(msgspec.to_builtins(fleet.send_request(node, messages.Stacks(job=job))))
        for node in range(len(fleet.hosts))
    }
    layout = [(rank.rank, rank.local_rank, rank.node) for rank in fleet.ranks]
    return to_json_value(diagnose(layout, answers, exit_codes={}))


def wait_until(condition: Callable[[], object]) -> None:
    until(condition, seconds=60)
