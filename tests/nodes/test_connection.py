"""Connections that start before AWS has answered."""

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


def count_logins(host: Host) -> int:
    return (host.root / "log").read_text().count("Accepted publickey")


def has_disconnected(host: Host) -> bool:
    return "Connection closed by" in (host.root / "log").read_text()


def preconnect_to(lab: Lab) -> Preconnect:
    return preconnect([host.endpoint for host in lab.hosts], lab.login())


def test_fleet_uses_the_connections_of_preconnect(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    with lab.fleet(preconnect=preconnect_to(lab)) as fleet:
        results = fleet.run(["pwd"], timeout_s=20)
        fleet.reconnect([0])
    assert {node: result.stdout.decode().strip() for node, result in results.items()} == {
        host.node: str(host.home) for host in lab.hosts
    }
    assert [count_logins(host) for host in lab.hosts] == [2, 1]


def test_node_with_a_new_address_is_connected_there_and_the_old_connection_closes(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    current, previous = lab.hosts
    hostkeys.add_keys(lab.known_hosts, {current.endpoint.instance_id: previous.seed.public})
    connections = preconnect([replace(current.endpoint, host=previous.host, port=previous.port)], lab.login())
    wait_until(lambda: count_logins(previous) == 1, "the login at the old address")
    with lab.fleet(preconnect=connections) as fleet:
        results = fleet.run(["pwd"], nodes=[0], timeout_s=20)
    assert results[0].stdout.decode().strip() == str(current.home)
    for connection in connections.values():
        connection.add_done_callback(close_when_connected)
    wait_until(lambda: has_disconnected(previous), "the end of the unused connection")


def test_host_with_another_key_gets_no_login_and_the_node_is_connected_again(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    other, node = lab.hosts
    hostkeys.set_keys(lab.known_hosts, {node.endpoint.instance_id: make_key("another").public})
    endpoint = replace(node.endpoint, host=other.host, port=other.port)
    connections = preconnect([endpoint], lab.login())
    with (
        pytest.raises(NodesFailed, match="host key mismatch"),
        Fleet([endpoint], lab.login(), preconnect=connections),
    ):
        pass
    assert (connections, count_logins(other)) == ({}, 0)
