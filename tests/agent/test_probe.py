"""The probe as it is sent, on two nodes of this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from awsddp.agent import messages
from awsddp.agent.log_stream import MAGIC
from awsddp.agent_client import calls
from awsddp.errors import NodeError
from tests.support.fleet import Answer, Fleet


class AgentConnection:
    """A connection to the agent of a node, for one request after another."""

    def __init__(self, fleet: Fleet, node: int) -> None:
        self.node = node
        self.address = str(fleet.hosts[node].node.private_ip)
        self._process = fleet.start(node, close=False)

    def ask(self, request: messages.Request[Answer]) -> Answer:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(calls.encode_request(request))
        self._process.stdin.flush()
        output = self._process.stdout.readline() + self._process.stdout.readline()
        return calls.parse_response(output, request=request, node=self.node)

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[AgentConnection, AgentConnection]]:
    fleet = Fleet(tmp_path, 2)
    connections = AgentConnection(fleet, 0), AgentConnection(fleet, 1)
    yield connections
    for connection in connections:
        connection.close()


def test_nodes_connect_and_close_their_ports_at_the_next_request(
    pair: tuple[AgentConnection, AgentConnection],
) -> None:
    first, second = pair
    result = first.ask(messages.Probe(address=first.address, ports=[0]))
    assert len(result.ports) == 2
    second.ask(messages.Probe(address=second.address))
    assert result.disk_free > 0 and 0 < result.memory_free <= result.memory_size and result.cpus > 0
    peers = [(0, first.address, port) for port in result.ports]
    dial = messages.Dial(peers=peers, seconds=20)
    assert list(second.ask(dial).dials) == sorted((0, port, "") for port in result.ports)

    first.ask(messages.State())
    assert {why for _, _, why in second.ask(dial).dials} == {"Connection refused"}


def test_thorough_probe_reports_no_gpu_on_a_node_without_one(
    pair: tuple[AgentConnection, AgentConnection],
) -> None:
    connection, _ = pair
    result = connection.ask(messages.Probe(address=connection.address, thorough=True))
    assert (result.smi, result.xids, result.links_down) == ((), (), 0)


def test_memory_and_cpu_limits_of_a_cgroup_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from awsddp.agent import probe

    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 50000\n")
    (tmp_path / "cpu.max").write_text("5000 100000\n")
    monkeypatch.setattr(probe, "_folders", lambda controller: [tmp_path])
    assert probe._memory() == (650000, 1000000)
    assert probe._cpus() == 0.05


def test_dial_answer_for_other_nodes_is_malformed() -> None:
    request = messages.Dial(peers=[(1, "10.0.0.1", 5)], seconds=1)
    with pytest.raises(NodeError, match="malformed"):
        calls.parse_response(MAGIC + b'{"dials": [[2, 5, ""]]}', request=request, node=0)
