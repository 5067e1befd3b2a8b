"""The switch of the nodes: real namespaces and interfaces."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from awsddp.local import network
from awsddp.local.place import Place
from tests.local.conftest import needs_root

GONE, NEW = "i-0000000000000000a", "i-0000000000000000b"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    network.close_network(made)


@needs_root
def test_a_node_that_is_gone_does_not_answer_at_its_address_whatever_holds_its_namespace(
    place: Place,
) -> None:
    block = network.open_switch(place, None)
    address = str(block[10])
    network.plug_in(place, GONE, address, prefix=block.prefixlen)
    with Path(f"/run/netns/{place.machine(GONE)}").open():  # what is open holds the namespace
        network.unplug(place, GONE)
        network.plug_in(place, NEW, address, prefix=block.prefixlen)
        shown = network.run("ip", "-n", place.switch, "-json", "link", "show", "master", "vpc")
        assert [link["ifname"] for link in json.loads(shown)] == ["machine", f"v{NEW[-12:]}"]


@needs_root
def test_what_is_not_there_is_unplugged_in_silence(place: Place) -> None:
    network.open_switch(place, None)
    network.unplug(place, GONE)
