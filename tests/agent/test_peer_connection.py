"""Two supervisors that must know the same secret."""

import socket

import pytest

from awsddp.agent.peer_connection import Link


def pair(secret: str = "s", other: str = "s") -> tuple[Link, Link]:
    first, second = socket.socketpair()
    return Link(first, secret, me=0), Link(second, other, me=1, node=0)


def tcp_pair() -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return Link(server.accept()[0], "s", me=0), Link(client, "s", me=1, node=0)


def turn(*links: Link) -> list[dict[str, object]]:
    heard: list[dict[str, object]] = []
    for _ in range(4):
        for link in links:
            heard += link.exchange()
    return heard


def test_both_sides_prove_themselves_and_then_talk() -> None:
    server, client = pair()
    client.send({"is": "too early"})
    assert turn(server, client) == []
    assert (server.is_authenticated, client.is_authenticated, server.node) == (True, True, 1)
    server.send({"do": "go"})
    client.send({"is": "here"})
    assert turn(client, server) == [{"do": "go"}, {"is": "here"}]


def test_answers_to_a_side_that_has_ended_find_it_closed_and_not_lost() -> None:
    server, client = tcp_pair()
    turn(server, client)
    client.send({"is": "started"})
    client.socket.close()  # as its end does
    assert server.exchange() == [{"is": "started"}]
    with pytest.raises(BrokenPipeError):
        for _ in range(100):  # the first answers reach nobody, and are refused by its kernel
            server.send({"received": 1})


def test_link_that_is_given_up_does_not_look_like_the_end_of_its_supervisor() -> None:
    server, client = tcp_pair()
    turn(server, client)
    client.close()
    with pytest.raises(ConnectionResetError):
        server.exchange()


def test_other_secret_is_refused() -> None:
    server, client = pair("s", "t")
    with pytest.raises(ConnectionError, match="secret"):
        turn(server, client)
    assert not server.is_authenticated


@pytest.mark.parametrize("said", ["null", " null", "x" * 64 + " null", "", '{"do": "go"}'])
def test_server_that_proves_nothing_is_not_obeyed(said: str) -> None:
    first, second = socket.socketpair()
    client = Link(second, "s", me=1, node=0)
    first.sendall(f"0 {'c' * 32}\n{said}\n".encode())
    with pytest.raises(ConnectionError, match="secret"):
        client.exchange()
    assert not client.is_authenticated


def test_server_that_sends_the_clients_own_proof_back_is_not_obeyed() -> None:
    first, second = socket.socketpair()
    client = Link(second, "s", me=1, node=0)
    first.sendall(f"0 {'c' * 32}\n".encode())
    assert client.exchange() == []
    _, proof, _ = first.recv(4096).split(b"\n")
    first.sendall(proof + b"\n")
    with pytest.raises(ConnectionError, match="secret"):
        client.exchange()
    assert not client.is_authenticated


def test_answer_cannot_be_reflected_or_replayed() -> None:
    server, client = pair()
    server.exchange()
    client.exchange()
    answer = server.socket.recv(4096)
    again, wire = socket.socketpair()
    second = Link(again, "s", me=0)
    wire.sendall(answer)
    with pytest.raises(ConnectionError, match="secret"):
        second.exchange()


def test_line_that_is_changed_on_its_way_is_not_obeyed() -> None:
    server, client = pair()
    turn(server, client)
    server.send({"do": "go"})
    line = client.socket.recv(4096)
    server.socket.sendall(line.replace(b"go", b"no"))
    with pytest.raises(ConnectionError, match="secret"):
        client.exchange()


@pytest.mark.parametrize("junk", [b"\xff\n", b"[]\n", b"x" * 5000, b"1\n", b"1 x\n"])
def test_junk_of_a_stranger_ends_the_connection(junk: bytes) -> None:
    server, client = pair()
    client.socket.sendall(junk)
    with pytest.raises(ConnectionError):
        server.exchange()


def test_message_larger_than_the_socket_takes_arrives_whole() -> None:
    server, client = pair()
    turn(server, client)
    text = "x" * 6_000_000  # as much as 100 ranks that fail say at their end
    client.send({"tail": text})
    assert client.has_unsent
    heard: list[dict[str, object]] = []
    while not heard:
        client.exchange()
        heard = server.exchange()
    assert heard == [{"tail": text}]
