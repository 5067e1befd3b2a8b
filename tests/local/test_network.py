"""The switch of the nodes: real namespaces and interfaces."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from awsddp.local import control, network
from awsddp.local.machine import CloudPaths, run
from tests.support.local_cloud import find_leftovers, needs_root

GONE, NEW = "i-0000000000000000a", "i-0000000000000000b"


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[CloudPaths]:
    paths = CloudPaths(tmp_path)
    yield paths
    network.close_network(paths)


@needs_root
def test_a_node_is_unplugged_even_if_a_process_holds_its_namespace(
    paths: CloudPaths,
) -> None:
    block, _ = network.open_switch(paths, None)
    address = str(block[10])
    network.plug_in(paths, GONE, address)
    with Path(f"/run/netns/{paths.machine_name(GONE)}").open():  # an open file keeps the namespace
        network.unplug(paths, GONE)
        network.plug_in(paths, NEW, address)
        output = run("ip", "-n", paths.switch, "-json", "link", "show", "master", "vpc")
        assert [link["ifname"] for link in json.loads(output)] == ["machine", f"v{NEW[-12:]}"]


@needs_root
def test_unplugging_a_missing_node_is_no_error(paths: CloudPaths) -> None:
    network.open_switch(paths, None)
    network.unplug(paths, GONE)


@needs_root
def test_stop_removes_a_namespace_that_remains_of_a_cloud(tmp_path: Path) -> None:
    run("ip", "netns", "add", CloudPaths(tmp_path).machine_name(GONE))
    assert control.stop(tmp_path)
    assert find_leftovers(tmp_path) == {}
    assert not control.stop(tmp_path)


RECEIVER = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("0.0.0.0", 4000))
print("up", flush=True)
print(receiver.recvfrom(64)[1][0], flush=True)
"""
SENDER = """
import socket, sys
for source in sys.argv[2:]:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.bind((source, 0))
    sender.sendto(b"x", (sys.argv[1], 4000))
"""


@needs_root
def test_packets_with_a_forged_source_address_are_dropped(paths: CloudPaths) -> None:
    block, _ = network.open_switch(paths, None)
    first, second = str(block[10]), str(block[11])
    for name, address in ((GONE, first), (NEW, second)):
        network.plug_in(paths, name, address)
    forged = "203.0.113.5"
    network.run_ip(f"addr add {forged}/32 dev lo", namespace=paths.machine_name(GONE))
    inside = ["ip", "netns", "exec"]
    receiver = subprocess.Popen(
        [*inside, paths.machine_name(NEW), sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "up\n"
    subprocess.run(
        [*inside, paths.machine_name(GONE), sys.executable, "-c", SENDER, second, forged, first], check=True
    )
    assert receiver.communicate(timeout=20)[0] == f"{first}\n"  # the forged packet is lost
