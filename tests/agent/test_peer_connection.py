"""Connections of two agents, which must know the same secret."""

import socket

import pytest

from awsddp.agent.peer_connection import Link


def make_pair(secret: str = "s", other_secret: str = "s") -> tuple[Link, Link]:
    first, second = socket.socketpair()
    return Link(first, secret, me=0), Link(second, other_secret, me=1, node=0)


def make_tcp_pair() -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return Link(server.accept()[0], "s", me=0), Link(client, "s", me=1, node=0)


def exchange(*links: Link) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = []
    for _ in range(4):
        for link in links:
            messages += link.exchange()
    return messages


def test_both_sides_authenticate_before_messages_pass() -> None:
    server, client = make_pair()
    client.send({"is": "too early"})
    assert exchange(server, client) == []
    assert (server.is_authenticated, client.is_authenticated, server.node) == (True, True, 1)
    server.send({"do": "go"})
    client.send({"is": "here"})
    assert exchange(client, server) == [{"do": "go"}, {"is": "here"}]


def test_messages_of_a_closed_side_are_read_and_answers_raise_broken_pipe() -> None:
    server, client = make_tcp_pair()
    exchange(server, client)
    client.send({"is": "started"})
    client.socket.close()  # as at the end of its process
    assert server.exchange() == [{"is": "started"}]
    with pytest.raises(BrokenPipeError):
        for _ in range(100):  # the kernel refuses the first ones
            server.send({"received": 1})


def test_closed_link_is_reset_and_does_not_look_like_the_end_of_its_agent() -> None:
    server, client = make_tcp_pair()
    exchange(server, client)
    client.close()
    with pytest.raises(ConnectionResetError):
        server.exchange()


def test_other_secret_is_refused() -> None:
    server, client = make_pair("s", "t")
    with pytest.raises(ConnectionError, match="secret"):
        exchange(server, client)
    assert not server.is_authenticated


@pytest.mark.parametrize("line", ["null", " null", "x" * 64 + " null", "", '{"do": "go"}'])
def test_server_without_a_valid_proof_is_refused(line: str) -> None:
    first, second = socket.socketpair()
    client = Link(second, "s", me=1, node=0)
    first.sendall(f"0 {'c' * 32}\n{line}\n".encode())
    with pytest.raises(ConnectionError, match="secret"):
        client.exchange()
    assert not client.is_authenticated


def test_server_that_sends_the_clients_proof_back_is_refused() -> None:
    first, second = socket.socketpair()
    client = Link(second, "s", me=1, node=0)
    first.sendall(f"0 {'c' * 32}\n".encode())
    assert client.exchange() == []
    _, proof, _ = first.recv(4096).split(b"\n")
    first.sendall(proof + b"\n")
    with pytest.raises(ConnectionError, match="secret"):
        client.exchange()
    assert not client.is_authenticated


def test_proof_cannot_be_replayed_on_another_connection() -> None:
    server, client = make_pair()
    server.exchange()
    client.exchange()
    answer = server.socket.recv(4096)
    again, wire = socket.socketpair()
    second = Link(again, "s", me=0)
    wire.sendall(answer)
    with pytest.raises(ConnectionError, match="secret"):
        second.exchange()


def test_line_that_was_changed_in_transit_is_refused() -> None:
    server, client = make_pair()
    exchange(server, client)
    server.send({"do": "go"})
    line = client.socket.recv(4096)
    server.socket.sendall(line.replace(b"go", b"no"))
    with pytest.raises(ConnectionError, match="secret"):
        client.exchange()


@pytest.mark.parametrize("junk", [b"\xff\n", b"[]\n", b"x" * 5000, b"1\n", b"1 x\n"])
def test_malformed_line_of_an_unauthenticated_client_ends_the_connection(junk: bytes) -> None:
    server, client = make_pair()
    client.socket.sendall(junk)
    with pytest.raises(ConnectionError):
        server.exchange()


def test_message_larger_than_the_socket_buffer_arrives_whole() -> None:
    server, client = make_pair()
    exchange(server, client)
    text = "x" * 6_000_000  # as much as 100 failed ranks report
    client.send({"tail": text})
    assert client.has_unsent
    messages: list[dict[str, object]] = []
    while not messages:
        client.exchange()
        messages = server.exchange()
    assert messages == [{"tail": text}]
