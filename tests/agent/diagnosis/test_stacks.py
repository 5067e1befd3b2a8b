"""The stacks of the processes of a node."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.support.stacks import diagnose_fleet, wait_until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def test_process_without_the_helper_is_not_signalled(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    fleet.hosts[0] = replace(fleet.hosts[0], prepared=replace(fleet.hosts[0].prepared, python="/bin/sleep"))
    fleet.write("600", "")
    fleet.launch("600", world_size=1)
    wait_until(lambda: diagnose_fleet(fleet)["ranks"][0]["pid"])
    assert diagnose_fleet(fleet)["ranks"][0]["state"] == "silent"
    assert fleet.document(0)["state"] == "running"
