"""Logs and the state of a job, as a node sends them to its followers."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.agent import messages
from awsddp.agent.log_stream import tail_start
from awsddp.agent_client.logs import Merger, Stream
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


@pytest.mark.prove
def test_follower_that_dies_or_does_not_read_does_not_delay_the_job(fleet: "Fleet", tmp_path: Path) -> None:
    fleet.launch("for number in range(200_000): print('line', number)\n")
    request = messages.Follow(job="job", offsets={})
    deaf = fleet.start(0, request)
    dead = fleet.start(0, request)
    assert dead.stdout is not None
    os.read(dead.stdout.fileno(), 10)
    dead.kill()
    assert fleet.wait().state == "succeeded"
    deaf.kill()
    for process in (deaf, dead):
        process.communicate()


@pytest.mark.prove
def test_follower_of_a_silent_job_gets_heartbeats(fleet: "Fleet") -> None:
    fleet.launch("import time\ntime.sleep(600)\n")
    process = fleet.start(1, messages.Follow(job="job", offsets={2: 0, 3: 0}))
    assert process.stdout is not None
    stream, kinds = Stream(), b""
    while kinds.count(b"H") < 2:
        kinds += b"".join(frame.kind for frame in stream.feed(os.read(process.stdout.fileno(), 1 << 16)))
    assert b"L" not in kinds
    assert b"E" not in kinds
    process.kill()
    process.communicate()


def test_killed_job_is_followed_to_its_end(fleet: "Fleet", tmp_path: Path) -> None:
    """An agent that is killed with unread data resets its connection, as a broken network may do."""
    fleet.launch("print('up', flush=True)\nimport time\ntime.sleep(600)\n", heartbeat_timeout="5s")
    until(fleet.ranks_are_up)
    for pid in fleet.supervisors(1):
        os.kill(pid, 9)  # the guard, too
    merger = Merger({rank.rank: rank.node for rank in fleet.ranks}, folder=tmp_path)
    output = fleet.follow(merger, 1) + fleet.follow(merger, 0)
    assert b"[rank 3 @ node1] up\n" in output
    assert [merger.documents[node].state for node in (0, 1)] == ["failed", "interrupted"]
    until(lambda: fleet.processes() == [])


@pytest.mark.parametrize(
    ("text", "count", "tail"),
    [
        (b"", 3, b""),
        (b"one\n", 3, b"one\n"),
        (b"one\ntwo\nthree\n", 2, b"two\nthree\n"),
        (b"one\ntwo\nthree", 2, b"two\nthree"),
        (b"\n\n\n", 2, b"\n\n"),
        (b"one\ntwo\n", 2, b"one\ntwo\n"),
        (b"a" * (5 << 20), 1, b"a" * (4 << 20)),
    ],
)
def test_tail_start_is_the_offset_of_the_last_lines(
    tmp_path: Path, text: bytes, count: int, tail: bytes
) -> None:
    path = tmp_path / "rank0.log"
    path.write_bytes(text)
    with path.open("rb") as log:
        assert text[tail_start(log.fileno(), count) :] == tail


def test_node_sends_only_the_tail(fleet: "Fleet", tmp_path: Path) -> None:
    fleet.run("for number in range(100_000): print('line', number)\n")
    process = fleet.start(1, messages.Follow(job="job", offsets={2: 0, 3: 0}, to_the_end=False, tail=3))
    frames = [frame for frame in Stream().feed(process.communicate()[0]) if frame.kind == b"L"]
    assert [(frame.rank, frame.offset) for frame in frames] == [
        (2, len(fleet.log(2)) - 33),
        (3, len(fleet.log(3)) - 33),
    ]
    assert {frame.payload for frame in frames} == {b"line 99997\nline 99998\nline 99999\n"}
    merger = Merger({rank.rank: rank.node for rank in fleet.ranks}, folder=tmp_path, tail=2)
    assert fleet.follow(merger, 0) == b"".join(
        b"[rank %d @ node0] line 9999%d\n" % (rank, n) for rank in (0, 1) for n in (8, 9)
    )
