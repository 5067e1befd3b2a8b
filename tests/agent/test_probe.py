"""The probe as it is sent, on two nodes of this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from awsddp.agent import messages
from awsddp.agent.log_stream import MAGIC
from awsddp.agent_client import calls
from awsddp.errors import NodeError
from tests.support.fleet import Fleet, Told


class Conversation:
    """The program of a node, and its answers, one after the other."""

    def __init__(self, fleet: Fleet, node: int) -> None:
        self.node = node
        self.address = str(fleet.hosts[node].node.private_ip)
        self._process = fleet.start(node, close=False)

    def ask(self, request: messages.Request[Told]) -> Told:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(calls.encode_request(request))
        self._process.stdin.flush()
        said = self._process.stdout.readline() + self._process.stdout.readline()
        return calls.parse_response(said, request=request, node=self.node)

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Conversation, Conversation]]:
    fleet = Fleet(tmp_path, 2)
    made = Conversation(fleet, 0), Conversation(fleet, 1)
    yield made
    for one in made:
        one.close()


def test_nodes_connect_and_close_their_ports_before_anything_else(
    pair: tuple[Conversation, Conversation],
) -> None:
    one, two = pair
    seen = one.ask(messages.Probe(address=one.address, ports=[0]))
    assert len(seen.ports) == 2
    two.ask(messages.Probe(address=two.address))
    assert seen.disk_free > 0 and 0 < seen.memory_free <= seen.memory_size and seen.cpus > 0
    peers = [(0, one.address, port) for port in seen.ports]
    dial = messages.Dial(peers=peers, seconds=20)
    assert list(two.ask(dial).dials) == sorted((0, port, "") for port in seen.ports)

    one.ask(messages.State())
    assert {why for _, _, why in two.ask(dial).dials} == {"Connection refused"}


def test_a_thorough_probe_finds_no_gpu_where_there_is_none(
    pair: tuple[Conversation, Conversation],
) -> None:
    one, _ = pair
    seen = one.ask(messages.Probe(address=one.address, thorough=True))
    assert (seen.smi, seen.xids, seen.links_down) == ((), (), 0)


def test_a_memory_limit_of_a_cgroup_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from awsddp.agent import probe

    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 50000\n")
    (tmp_path / "cpu.max").write_text("5000 100000\n")
    monkeypatch.setattr(probe, "_folders", lambda controller: [tmp_path])
    assert probe._memory() == (650000, 1000000)
    assert probe._cpus() == 0.05


def test_an_answer_that_dials_others_than_asked_is_malformed() -> None:
    request = messages.Dial(peers=[(1, "10.0.0.1", 5)], seconds=1)
    with pytest.raises(NodeError, match="malformed"):
        calls.parse_response(MAGIC + b'{"dials": [[2, 5, ""]]}', request=request, node=0)
