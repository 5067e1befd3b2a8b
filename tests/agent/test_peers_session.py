"""A session over successive links, without sockets."""

import random

from awsddp.agent.peers import Frame, Session


def test_message_is_resent_until_it_is_acknowledged() -> None:
    sender, receiver = Session(), Session()
    sender.send({"is": "here"})
    assert receiver.receive(sender.pending_frame()) == [{"is": "here"}]
    assert sender.has_pending
    sender.receive(receiver.pending_frame())
    assert (sender.has_pending, sender.pending_frame()) == (False, Frame(0, 1, []))


def test_duplicate_frame_is_received_once() -> None:
    sender, receiver = Session(), Session()
    frame = sender.send({"is": "here"})
    assert [
        *receiver.receive(frame),
        *receiver.receive(frame),
        *receiver.receive(sender.pending_frame()),
    ] == [{"is": "here"}]


def test_frame_after_a_lost_one_is_received_only_with_it() -> None:
    sender, receiver = Session(), Session()
    sender.send({"message": 1})
    late = sender.send({"message": 2})
    assert not receiver.receive(late)
    assert receiver.receive(sender.pending_frame()) == [{"message": 1}, {"message": 2}]


def test_late_frame_of_an_old_link_is_ignored() -> None:
    sender, receiver = Session(), Session()
    sender.send(1)
    old = sender.pending_frame()
    late = receiver.pending_frame()
    assert receiver.receive(sender.pending_frame()) == [1]
    sender.receive(receiver.pending_frame())
    assert (list(receiver.receive(old)), list(sender.receive(late)), sender.has_pending) == ([], [], False)
    assert receiver.receive(sender.send(2)) == [2]


def test_each_message_arrives_once_and_in_order_over_links_that_break() -> None:
    dice = random.Random(5)
    sides = Session(), Session()
    sent: tuple[list[int], list[int]] = ([], [])
    received: tuple[list[int], list[int]] = ([], [])
    for _ in range(200):  # links
        wires = [sides[0].pending_frame()], [sides[1].pending_frame()]
        for _ in range(dice.randrange(20)):
            side = dice.randrange(2)
            if dice.randrange(3):
                sent[side].append(len(sent[side]))
                wires[side].append(sides[side].send(sent[side][-1]))
            else:
                wires[side].append(sides[side].pending_frame())
            reader = dice.randrange(2)
            if wires[1 - reader]:
                received[reader].extend(sides[reader].receive(wires[1 - reader].pop(0)))
    for side in (0, 1):
        received[side].extend(sides[side].receive(sides[1 - side].pending_frame()))
    assert received == (sent[1], sent[0])
