"""The switch of the nodes: real namespaces and interfaces."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from awsddp.local import control, network
from awsddp.local.machine import CloudPaths, run
from tests.support.local_cloud import left_over, needs_root

GONE, NEW = "i-0000000000000000a", "i-0000000000000000b"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[CloudPaths]:
    made = CloudPaths(tmp_path)
    yield made
    network.close_network(made)


@needs_root
def test_a_node_that_is_gone_does_not_answer_at_its_address_whatever_holds_its_namespace(
    place: CloudPaths,
) -> None:
    block, _ = network.open_switch(place, None)
    address = str(block[10])
    network.plug_in(place, GONE, address)
    with Path(f"/run/netns/{place.machine_name(GONE)}").open():  # what is open holds the namespace
        network.unplug(place, GONE)
        network.plug_in(place, NEW, address)
        shown = run("ip", "-n", place.switch, "-json", "link", "show", "master", "vpc")
        assert [link["ifname"] for link in json.loads(shown)] == ["machine", f"v{NEW[-12:]}"]


@needs_root
def test_what_is_not_there_is_unplugged_in_silence(place: CloudPaths) -> None:
    network.open_switch(place, None)
    network.unplug(place, GONE)


@needs_root
def test_stop_ends_a_namespace_that_is_all_that_is_left_of_a_cloud(tmp_path: Path) -> None:
    run("ip", "netns", "add", CloudPaths(tmp_path).machine_name(GONE))
    assert control.stop(tmp_path)
    assert left_over(tmp_path) == {}
    assert not control.stop(tmp_path)


HEARS = """
import socket, sys
heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
heard.bind(("0.0.0.0", 4000))
print("up", flush=True)
print(heard.recvfrom(64)[1][0], flush=True)
"""
SAYS = """
import socket, sys
for source in sys.argv[2:]:
    said = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    said.bind((source, 0))
    said.sendto(b"x", (sys.argv[1], 4000))
"""


@needs_root
def test_a_node_is_not_heard_with_an_address_from_outside(place: CloudPaths) -> None:
    block, _ = network.open_switch(place, None)
    first, second = str(block[10]), str(block[11])
    for name, address in ((GONE, first), (NEW, second)):
        network.plug_in(place, name, address)
    forged = "203.0.113.5"
    network.run_ip(f"addr add {forged}/32 dev lo", namespace=place.machine_name(GONE))
    inside = ["ip", "netns", "exec"]
    hears = subprocess.Popen(
        [*inside, place.machine_name(NEW), sys.executable, "-c", HEARS], stdout=subprocess.PIPE, text=True
    )
    assert hears.stdout is not None
    assert hears.stdout.readline() == "up\n"
    subprocess.run(
        [*inside, place.machine_name(GONE), sys.executable, "-c", SAYS, second, forged, first], check=True
    )
    assert hears.communicate(timeout=20)[0] == f"{first}\n"  # the second one it said is the first heard
