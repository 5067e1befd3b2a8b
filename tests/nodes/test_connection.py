"""Connections that are begun while AWS is still asked."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from awsddp.nodes import hostkeys
from awsddp.nodes.connection import Preconnect, close_when_connected, preconnect
from awsddp.nodes.fleet import Fleet
from awsddp.nodes.hostkeys import make_key
from awsddp.util.parallel import NodesFailed
from tests.support.ssh_hosts import Host, Lab, wait_until

MakeLab = Callable[[int], Lab]


def logins(host: Host) -> int:
    return (host.root / "log").read_text().count("Accepted publickey")


def hung_up(host: Host) -> bool:
    return "Connection closed by" in (host.root / "log").read_text()


def preconnect_to(lab: Lab) -> Preconnect:
    return preconnect([host.endpoint for host in lab.hosts], lab.login())


def test_a_fleet_goes_on_with_the_connections_that_were_begun(lab: MakeLab) -> None:
    two = lab(2)
    with two.fleet(preconnect=preconnect_to(two)) as fleet:
        said = fleet.run(["pwd"], timeout_s=20)
        fleet.reconnect([0])
    assert {node: result.stdout.decode().strip() for node, result in said.items()} == {
        host.node: str(host.home) for host in two.hosts
    }
    assert [logins(host) for host in two.hosts] == [2, 1]


def test_a_node_that_is_elsewhere_now_is_connected_to_there_and_the_other_connection_is_cut(
    lab: MakeLab,
) -> None:
    two = lab(2)
    here, there = two.hosts
    hostkeys.add_keys(two.known_hosts, {here.endpoint.instance_id: there.seed.public})
    begun = preconnect([replace(here.endpoint, host=there.host, port=there.port)], two.login())
    wait_until(lambda: logins(there) == 1, "the login at the old address")
    with two.fleet(preconnect=begun) as fleet:
        said = fleet.run(["pwd"], nodes=[0], timeout_s=20)
    assert said[0].stdout.decode().strip() == str(here.home)
    for connection in begun.values():
        connection.add_done_callback(close_when_connected)
    wait_until(lambda: hung_up(there), "the end of the connection that nobody took")


def test_a_host_with_another_key_gets_no_login_and_the_node_is_asked_anew(lab: MakeLab) -> None:
    two = lab(2)
    here, there = two.hosts
    hostkeys.set_keys(two.known_hosts, {there.endpoint.instance_id: make_key("another").public})
    elsewhere = replace(there.endpoint, host=here.host, port=here.port)
    begun = preconnect([elsewhere], two.login())
    with (
        pytest.raises(NodesFailed, match="host key mismatch"),
        Fleet([elsewhere], two.login(), preconnect=begun),
    ):
        pass
    assert (begun, logins(here)) == ({}, 0)
