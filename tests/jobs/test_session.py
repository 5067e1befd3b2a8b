"""A conversation that outlives its links, without any."""

import random

from awsddp.jobs.supervisor.peers import Session


def test_message_is_resent_until_it_is_acknowledged() -> None:
    sender, receiver = Session(), Session()
    sender.send({"is": "here"})
    assert receiver.receive(sender.resend()[0]) == {"is": "here"}
    assert sender.pending
    sender.receive(receiver.acknowledge())
    assert (sender.pending, sender.resend()) == (False, [])


def test_frame_that_comes_twice_counts_once() -> None:
    sender, receiver = Session(), Session()
    frame = sender.send({"is": "here"})
    assert [receiver.receive(frame), receiver.receive(frame)] == [{"is": "here"}, None]


def test_frame_after_a_lost_one_waits_for_it() -> None:
    sender, receiver = Session(), Session()
    sender.send({"message": 1})
    late = sender.send({"message": 2})
    assert receiver.receive(late) is None
    assert [receiver.receive(frame) for frame in sender.resend()] == [{"message": 1}, {"message": 2}]


def test_each_message_arrives_once_and_in_order_over_links_that_lose_their_ends() -> None:
    dice = random.Random(5)
    sides = Session(), Session()
    sent: tuple[list[int], list[int]] = ([], [])
    received: tuple[list[int], list[int]] = ([], [])
    for _ in range(200):  # links
        wires = sides[0].resend(), sides[1].resend()
        for _ in range(dice.randrange(20)):
            side = dice.randrange(2)
            sent[side].append(len(sent[side]))
            wires[side].append(sides[side].send({"count": sent[side][-1]}))
            other = dice.randrange(2)
            if wires[1 - other]:
                message = sides[other].receive(wires[1 - other].pop(0))
                received[other].extend([] if message is None else [message["count"]])
    for side in (0, 1):
        for frame in sides[1 - side].resend():
            message = sides[side].receive(frame)
            received[side].extend([] if message is None else [message["count"]])
    assert received == (sent[1], sent[0])
