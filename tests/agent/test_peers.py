"""Links of two agents over a network that breaks: real sockets, and a simulated clock."""

import contextlib
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from awsddp.agent.peers import Peers, report_lost
from tests.support.fleet import free_ports, make_launch


class Relay:
    """Forwards connections from its address to the first node, except in `blocked` directions: up, down."""

    def __init__(self, host: str, target: tuple[str, int]) -> None:
        self.host = host
        self._target = target
        self._listener = socket.create_server((host, target[1]))
        self._listener.setblocking(False)
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.blocked: set[str] = set()

    def pump(self) -> None:
        with contextlib.suppress(OSError):
            near = self._listener.accept()[0]
            self.pairs.append((near, socket.create_connection(self._target)))
            for sock in self.pairs[-1]:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for near, far in self.pairs:
            for name, source, sink in (("up", near, far), ("down", far, near)):
                if name not in self.blocked:
                    self._move(source, sink)

    def _move(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            sink.sendall(data) if data else sink.shutdown(socket.SHUT_WR)
        except ConnectionResetError:
            reset(sink)
        except OSError:
            return

    def reset(self) -> None:
        """Reset all connections, as a router does that has lost its state."""
        for pair in self.pairs:
            for sock in pair:
                reset(sock)
        self.pairs.clear()

    def close(self) -> None:
        self.reset()
        self._listener.close()


def reset(sock: socket.socket) -> None:
    if sock.fileno() < 0:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Wire:
    """The agents of nodes 0 and 1, and the relay between them."""

    def __init__(self) -> None:
        host, port = f"127.9.{secrets.randbelow(250)}", free_ports()
        near, far = (
            [{"node": node, "private_ip": f"{host}.{at}", "instance_id": f"i-{node}"} for node in (0, 1)]
            for at in (1, 2)
        )
        self.request = make_launch(nodes=near, link_port=port, silent_s=60.0)
        self.now = 1000.0
        self.listener: socket.socket | None = socket.create_server((f"{host}.1", port))
        self.relay = Relay(f"{host}.2", (f"{host}.1", port))
        self.selectors = selectors.DefaultSelector(), selectors.DefaultSelector()
        self.first = Peers(self.request, self.selectors[0], self.listener, now=self.now)
        self.far = make_launch(1, nodes=far, link_port=port, silent_s=60.0)
        self.second = Peers(self.far, self.selectors[1], None, now=self.now)

    def pass_time(self, seconds: float, *, alive: tuple[int, ...] = (0, 1)) -> None:
        """Advance the clock in steps of 0.25 s, and run the agents of the nodes `alive`."""
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            for _ in range(6):  # a message and its answer, through the relay
                self.relay.pump()
                for node in alive:
                    for key, _ in self.selectors[node].select(0):
                        (self.first, self.second)[node].handle_event(key.data, self.now)
            for node in alive:
                (self.first, self.second)[node].tick(self.now)

    def received(self) -> tuple[list[Any], list[Any]]:
        """Return the messages that each side has received."""
        return [message for _, message in self.first.received], [
            message for _, message in self.second.received
        ]

    def lost(self) -> list[int]:
        return [node for node, *_ in self.first.lost + self.second.lost]


@pytest.fixture
def wire() -> Iterator[Wire]:
    pair = Wire()
    pair.pass_time(2)
    assert pair.first.joined
    assert pair.second.joined
    yield pair
    pair.relay.close()
    for selector in pair.selectors:
        for key in list(selector.get_map().values()):
            key.fileobj.close()
        selector.close()


def test_session_continues_over_a_new_link_after_a_reset(wire: Wire) -> None:
    wire.first.send({"count": 1})
    wire.relay.reset()
    wire.first.send({"count": 2})
    wire.second.send({"count": 3})
    wire.pass_time(3)
    assert wire.received() == ([{"count": 3}], [{"count": 1}, {"count": 2}])
    assert (wire.lost(), wire.first.has_unacknowledged, wire.second.has_unacknowledged) == ([], False, False)


@pytest.mark.parametrize("blocked", [{"up"}, {"down"}, {"up", "down"}])
def test_silent_link_is_replaced_without_losing_messages(wire: Wire, blocked: set[str]) -> None:
    wire.relay.blocked = blocked
    wire.first.send({"count": 1})
    wire.second.send({"count": 2})
    wire.pass_time(30)
    assert wire.lost() == []
    wire.relay.blocked = set()
    wire.pass_time(8)
    assert wire.received() == ([{"count": 2}], [{"count": 1}])
    assert (wire.lost(), wire.first.has_unacknowledged, wire.second.has_unacknowledged) == ([], False, False)


def test_new_link_replaces_one_that_stays_dead(wire: Wire) -> None:
    dead = wire.relay.pairs.pop()
    wire.pass_time(10)
    wire.second.send({"count": 1})
    wire.pass_time(1)
    assert (wire.received()[0], wire.lost()) == ([{"count": 1}], [])
    for sock in dead:
        sock.close()


def test_each_side_reports_the_other_lost_after_the_limit_and_not_before(wire: Wire) -> None:
    wire.relay.blocked = {"up", "down"}
    wire.pass_time(58)
    assert wire.lost() == []
    wire.pass_time(4)
    assert wire.lost() == [1, 0]
    assert wire.first.lost == [(1, "no heartbeat for 60 s", "node_lost")]


def test_agent_that_was_paused_itself_reports_no_peer_lost(wire: Wire) -> None:
    wire.now += 500
    wire.first.reset_clocks(wire.now)
    wire.first.tick(wire.now)
    assert wire.lost() == []


def test_agent_that_closed_its_connection_is_lost_at_once(wire: Wire) -> None:
    for key in list(wire.selectors[1].get_map().values()):
        key.fileobj.close()
    wire.pass_time(0.5, alive=(0,))
    [(node, why, _)] = wire.first.lost
    assert (node, why.startswith("its agent has ended and closed the connection")) == (1, True)


def test_last_messages_of_an_agent_that_ended_are_received(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise BrokenPipeError

    link = wire.first._peers[1].link
    assert link is not None
    monkeypatch.setattr(link, "send", refuse)
    wire.second.send({"count": 1})
    wire.second.send({"count": 2})
    wire.pass_time(0.5)
    assert (wire.received()[0], wire.lost()) == ([{"count": 1}, {"count": 2}], [1])


def test_first_agent_is_lost_when_its_port_refuses_connections(wire: Wire) -> None:
    wire.relay.close()
    wire.pass_time(1.5, alive=(1,))
    assert wire.lost() == []
    wire.pass_time(2, alive=(1,))
    assert wire.second.lost == [(0, "its agent has ended", "node_lost")]


def test_report_of_a_lost_node_is_received_while_its_link_hangs(wire: Wire) -> None:
    wire.relay.blocked = {"up", "down"}
    answers: list[bool] = []

    def report() -> None:
        answers.append(report_lost(wire.request, 1, "it burnt", kind="instance_retired", seconds=5))

    thread = threading.Thread(target=report)
    thread.start()
    while thread.is_alive():
        wire.pass_time(0.25, alive=(0,))
        thread.join(0.01)
    assert (answers, wire.first.lost) == ([True], [(1, "it burnt", "instance_retired")])


def test_report_of_a_responsive_node_keeps_its_link(wire: Wire) -> None:
    link = wire.first._peers[1].link
    thread = threading.Thread(target=report_lost, args=(wire.request, 1, "it burnt"), kwargs={"seconds": 5})
    thread.start()
    while thread.is_alive():
        wire.pass_time(0.25)
        thread.join(0.01)
    wire.second.send({"count": 1})
    wire.pass_time(1)
    assert (wire.received()[0], wire.first.lost) == ([{"count": 1}], [(1, "it burnt", "node_lost")])
    assert wire.first._peers[1].link is link


@pytest.mark.parametrize("kind", ["timeout", "burnt", ["node_lost"], None])
def test_report_with_an_invalid_kind_counts_as_node_lost(wire: Wire, kind: Any) -> None:
    link = wire.second._peers[0].link
    assert link is not None
    link.send({"lost": "it burnt", "kind": kind})
    wire.pass_time(1.0)
    assert wire.first.lost == [(1, "it burnt", "node_lost")]


def test_report_to_an_agent_that_has_ended_is_not_received(wire: Wire) -> None:
    assert not report_lost(make_launch(link_port=free_ports()), 1, "it burnt", seconds=60)


@pytest.fixture
def unjoined() -> Iterator[Wire]:
    """Two agents that never reach each other."""
    pair = Wire()
    pair.relay.close()
    yield pair
    for selector in pair.selectors:
        for key in list(selector.get_map().values()):
            key.fileobj.close()
        selector.close()


def test_silent_agent_that_has_not_joined_is_not_lost(unjoined: Wire) -> None:
    unjoined.pass_time(61, alive=(0,))
    assert unjoined.lost() == []


def test_first_agent_that_does_not_listen_yet_is_not_lost(unjoined: Wire) -> None:
    unjoined.pass_time(30, alive=(1,))
    assert unjoined.lost() == []
