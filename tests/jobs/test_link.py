"""Two supervisors that must know the same secret."""

import json
import socket

import pytest

from awsddp.jobs.supervisor.link import Link, LinkClosed, LinkLost


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
            link.flush()
            heard += link.receive()
    return heard


def test_both_sides_prove_themselves_and_then_talk() -> None:
    server, client = pair()
    assert turn(server, client) == []
    assert (server.proved, client.proved, server.node) == (True, True, 1)
    server.send({"do": "go"})
    client.send({"is": "here"})
    assert turn(client, server) == [{"do": "go"}, {"is": "here"}]


def test_answers_to_a_side_that_has_ended_find_it_closed_and_not_lost() -> None:
    server, client = tcp_pair()
    turn(server, client)
    client.send({"is": "started"})
    client.close()
    assert server.receive() == [{"is": "started"}]
    with pytest.raises(LinkClosed):
        for _ in range(100):  # the first answers reach nobody, and are refused by its kernel
            server.send({"received": 1})


def test_other_secret_is_refused() -> None:
    server, client = pair("s", "t")
    with pytest.raises(LinkLost, match="secret"):
        turn(server, client)
    assert not server.proved


@pytest.mark.parametrize("said", [{"proof": "None"}, {"proof": ""}, {"proof": None}, {}, {"do": "go"}])
def test_server_that_proves_nothing_is_not_obeyed(said: dict[str, object]) -> None:
    first, second = socket.socketpair()
    client = Link(second, "s", me=1, node=0)
    first.sendall(json.dumps(said).encode() + b"\n")
    with pytest.raises(LinkLost):
        client.receive()


def test_server_that_sends_the_clients_own_proof_back_is_not_obeyed() -> None:
    first, second = socket.socketpair()
    client = Link(second, "s", me=1, node=0)
    first.sendall(json.dumps({"challenge": "c" * 32}).encode() + b"\n")
    assert client.receive() == []
    proof = json.loads(first.recv(4096))["proof"]
    first.sendall(json.dumps({"proof": proof}).encode() + b"\n")
    with pytest.raises(LinkLost, match="secret"):
        client.receive()
    assert not client.proved


def test_answer_cannot_be_reflected_or_replayed() -> None:
    server, client = pair()
    server.flush()
    client.receive()
    answer = server.socket.recv(4096)
    again, wire = socket.socketpair()
    second = Link(again, "s", me=0)
    wire.sendall(answer)
    with pytest.raises(LinkLost, match="secret"):
        second.receive()


@pytest.mark.parametrize("junk", [b"\xff\n", b"[]\n", b"x" * 5000, b"{\n"])
def test_junk_of_a_stranger_ends_the_connection(junk: bytes) -> None:
    server, client = pair()
    client.socket.sendall(junk)
    with pytest.raises(LinkLost):
        server.receive()


def test_message_larger_than_the_socket_takes_arrives_whole() -> None:
    server, client = pair()
    turn(server, client)
    text = "x" * 1_000_000
    client.send({"tail": text})
    assert client.unsent
    heard: list[dict[str, object]] = []
    while not heard:
        client.flush()
        heard = server.receive()
    assert heard == [{"tail": text}]
