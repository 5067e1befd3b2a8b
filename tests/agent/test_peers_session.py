"""A conversation that outlives its links, without any."""

import random

from awsddp.agent.peers import Frame, Session


def test_message_is_said_again_until_it_is_heard() -> None:
    sender, receiver = Session(), Session()
    sender.say({"is": "here"})
    assert receiver.hear(sender.frame()) == [{"is": "here"}]
    assert sender.pending
    sender.hear(receiver.frame())
    assert (sender.pending, sender.frame()) == (False, Frame(0, 1, []))


def test_frame_that_comes_twice_counts_once() -> None:
    sender, receiver = Session(), Session()
    frame = sender.say({"is": "here"})
    assert [*receiver.hear(frame), *receiver.hear(frame), *receiver.hear(sender.frame())] == [{"is": "here"}]


def test_frame_after_a_lost_one_waits_for_it() -> None:
    sender, receiver = Session(), Session()
    sender.say({"message": 1})
    late = sender.say({"message": 2})
    assert not receiver.hear(late)
    assert receiver.hear(sender.frame()) == [{"message": 1}, {"message": 2}]


def test_frame_of_an_old_link_that_comes_late_changes_nothing() -> None:
    sender, receiver = Session(), Session()
    sender.say(1)
    old = sender.frame()
    late = receiver.frame()
    assert receiver.hear(sender.frame()) == [1]
    sender.hear(receiver.frame())
    assert (list(receiver.hear(old)), list(sender.hear(late)), sender.pending) == ([], [], False)
    assert receiver.hear(sender.say(2)) == [2]


def test_each_message_arrives_once_and_in_order_over_links_that_lose_their_ends() -> None:
    dice = random.Random(5)
    sides = Session(), Session()
    sent: tuple[list[int], list[int]] = ([], [])
    received: tuple[list[int], list[int]] = ([], [])
    for _ in range(200):  # links
        wires = [sides[0].frame()], [sides[1].frame()]
        for _ in range(dice.randrange(20)):
            side = dice.randrange(2)
            if dice.randrange(3):
                sent[side].append(len(sent[side]))
                wires[side].append(sides[side].say(sent[side][-1]))
            else:
                wires[side].append(sides[side].frame())
            other = dice.randrange(2)
            if wires[1 - other]:
                received[other].extend(sides[other].hear(wires[1 - other].pop(0)))
    for side in (0, 1):
        received[side].extend(sides[side].hear(sides[1 - side].frame()))
    assert received == (sent[1], sent[0])
