"""Logs are merged, labelled, and stored byte by byte."""

import hashlib
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.agent import messages
from awsddp.agent.log_stream import HEADER, MAGIC
from awsddp.agent_client.logs import Labeller, Merger, Stream, last_lines
from awsddp.errors import ConfigError, NodeError

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

LABEL = b"[rank 3 @ node1] "


def make_frame(kind: bytes, rank: int = 0, offset: int = 0, payload: bytes = b"") -> bytes:
    return HEADER.pack(kind, rank, offset, len(payload)) + payload


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], b"[L] one\n[L] two\n"),
        ([b"on", b"e\nt", b"wo", b"\n"], b"[L] one\n[L] two\n"),
        ([b"\n\n"], b"[L] \n[L] \n"),
        ([b"no end"], b"[L] no end\n"),
        ([b"windows\r\n"], b"[L] windows\n"),
        ([b"\r 1%\r 50%\r100%\ndone\n"], b"[L] 100%\n[L] done\n"),
        ([b"a\rb\rc\r\nd\n"], b"[L] c\n[L] d\n"),
        ([b"\0\xff\x1b[0m\n"], b"[L] \0\xff\x1b[0m\n"),
        ([], b""),
    ],
)
def test_each_line_gets_its_label(pieces: list[bytes], expected: bytes) -> None:
    labeller = Labeller(b"[L] ")
    assert b"".join(labeller.feed(piece, now=0) for piece in pieces) + labeller.finish() == expected


def test_unfinished_line_is_shown_once_after_a_pause() -> None:
    labeller = Labeller(b"[L] ")
    assert labeller.feed(b"Name: ", now=10) == b""
    assert labeller.pause(now=11) == b"[L] Name: \n"
    assert labeller.pause(now=13) == b""
    assert labeller.feed(b"\nnext\n", now=14) == b"[L] next\n"


def test_line_is_not_split_when_its_rest_arrives_late(tmp_path: Path) -> None:
    clock = Clock()
    merger = Merger({3: 1}, folder=tmp_path, clock=clock)
    merger.attach(1)
    text = b"step 1 loss 2.3\nstep 32 lr 0.1\n"
    output = merger.feed(1, MAGIC + make_frame(b"L", 3, 0, text[:20]))
    for _ in range(3):
        clock.now += 5
        output += merger.feed(1, make_frame(b"H"))
    output += merger.feed(1, make_frame(b"L", 3, 20, text[20:]))
    assert output == b"".join(LABEL + line for line in text.splitlines(keepends=True))


def test_long_line_that_keeps_growing_is_not_split() -> None:
    labeller = Labeller(b"[L] ")
    output = b"".join(labeller.feed(b"x" * 250_000, now=step * 2) for step in range(40))
    assert output + labeller.feed(b"\n", now=80) == b"[L] " + b"x" * 10_000_000 + b"\n"


def test_line_of_32_mb_is_shown_in_parts() -> None:
    labeller = Labeller(b"[L] ")
    parts = [labeller.feed(b"x" * (1 << 20), now=0) for _ in range(33)]
    assert [len(part) for part in parts if part] == [len(b"[L] \n") + (32 << 20)]


def test_progress_bar_that_never_ends_its_line_is_shown_once_a_second() -> None:
    labeller = Labeller(b"[L] ")
    lines = [labeller.feed(b"\r%d%%" % tenth, now=tenth / 10) for tenth in range(35)]
    assert [line for line in lines if line] == [b"[L] 9%\n", b"[L] 19%\n", b"[L] 29%\n"]
    assert labeller.pause(now=4.5) == b"[L] 34%\n"
    assert labeller.feed(b"\r100%\n", now=5) == b"[L] 100%\n"


def test_multibyte_character_is_not_split() -> None:
    labeller = Labeller(b"[L] ")
    whole = "naïve 😀".encode()
    labeller.feed(whole[:-2], now=0)
    assert labeller.pause(now=2) == "[L] naïve \n".encode()
    assert labeller.feed(whole[-2:] + b"\n", now=3) == "[L] 😀\n".encode()


def test_stream_is_parsed_after_the_output_of_a_login_script() -> None:
    stream = Stream()
    sent = b"Welcome!\n" + MAGIC + make_frame(b"L", 3, 0, b"hello\n") + make_frame(b"H")
    frames = [frame for byte in range(len(sent)) for frame in stream.feed(sent[byte : byte + 1])]
    assert [(frame.kind, frame.rank, frame.payload) for frame in frames] == [
        (b"L", 3, b"hello\n"),
        (b"H", 0, b""),
    ]


def test_error_in_place_of_a_stream_is_raised(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="there is no job x"):
        Stream().feed(MAGIC + b'{"error": {"message": "there is no job x"}}\n')


def test_each_byte_is_stored_once_over_broken_connections(tmp_path: Path) -> None:
    chance = random.Random(7)
    data = b"".join(b"line %d\n" % number for number in range(3000))
    merger = Merger({3: 1}, folder=tmp_path)
    output, connections = b"", 0
    while (at := merger.attach(1)[3]) < len(data):
        connections += 1
        start = max(0, at - chance.randrange(50))  # a node may send more than was requested
        cuts = range(start, min(start + 3000, len(data)), 100)
        sent = MAGIC + b"".join(make_frame(b"L", 3, cut, data[cut : cut + 100]) for cut in cuts)
        output += merger.feed(1, sent[: chance.randrange(len(sent) + 1)])
    assert connections > 10
    assert (tmp_path / "rank3.log").read_bytes() == data
    assert output == b"".join(LABEL + line + b"\n" for line in data.splitlines())


def test_folder_that_cannot_be_written_is_named_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    merger = Merger({3: 1}, folder=tmp_path / "runs" / "j" / "logs", job="j")
    merger.attach(1)
    with pytest.raises(ConfigError, match=r"cannot write .*/runs/j/logs") as raised:
        merger.feed(1, MAGIC + make_frame(b"L", 3, 0, b"one\n"))
    assert raised.value.why == "Not a directory\nthe job continues, because it does not need this machine"
    assert "awsddp logs -f j -o job.results=DIR" in raised.value.next


def test_gap_in_a_stream_is_an_error(tmp_path: Path) -> None:
    merger = Merger({3: 1}, folder=tmp_path)
    merger.attach(1)
    with pytest.raises(NodeError, match="omitted 5 bytes of the log of rank 3"):
        merger.feed(1, MAGIC + make_frame(b"L", 3, 5, b"late"))
    merger.attach(1)
    with pytest.raises(NodeError, match="does not run there"):
        merger.feed(1, MAGIC + make_frame(b"L", 4, 0, b"foreign"))


def test_second_client_shows_everything_and_requests_only_the_rest(tmp_path: Path) -> None:
    first = Merger({3: 1}, folder=tmp_path)
    first.attach(1)
    first.feed(1, MAGIC + make_frame(b"L", 3, 0, b"one\ntw"))
    second = Merger({3: 1}, folder=tmp_path)
    assert b"".join(second.replay()) == LABEL + b"one\n"
    assert second.attach(1) == {3: 6}
    assert second.feed(1, MAGIC + make_frame(b"L", 3, 6, b"o\n")) == LABEL + b"two\n"
    assert (tmp_path / "rank3.log").read_bytes() == b"one\ntwo\n"


def test_only_chosen_ranks_are_shown_and_all_are_stored(tmp_path: Path) -> None:
    merger = Merger({0: 0, 1: 0}, folder=tmp_path, shown_ranks={1})
    merger.attach(0)
    sent = MAGIC + make_frame(b"L", 0, 0, b"zero\n") + make_frame(b"L", 1, 0, b"one\n")
    assert merger.feed(0, sent) == b"[rank 1 @ node0] one\n"
    assert (tmp_path / "rank0.log").read_bytes() == b"zero\n"


def make_report(node: int, state: str, **extra: object) -> bytes:
    """Return the report of a node on job j, whose ranks 0 and 1 run on nodes 0 and 1."""
    ranks = [
        {"rank": rank, "local_rank": 0, "node": rank, "exit_code": None, "seconds": 0.0} for rank in (0, 1)
    ]
    fields = {"job": "j", "node": node, "state": state, "cause": None, "complete": True, "ranks": ranks}
    return json.dumps({**fields, "created": "2026-01-01T00:00:00+00:00", **extra}).encode()


def test_merger_knows_when_every_node_has_ended(tmp_path: Path) -> None:
    merger = Merger({0: 0, 1: 1}, folder=tmp_path, clock=Clock())
    merger.attach(0)
    merger.attach(1)
    merger.feed(0, MAGIC + make_frame(b"S", payload=make_report(0, "running")))
    assert (merger.documents[0].job, merger.documents[0].state) == ("j", "running")
    merger.feed(0, make_frame(b"E", payload=make_report(0, "failed")))
    assert (merger.documents[0].state, merger.has_ended(0), merger.has_ended(1)) == ("failed", True, False)
    merger.feed(1, MAGIC + make_frame(b"E", payload=make_report(1, "failed")))
    assert merger.has_ended(1)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (make_report(1, "running"), "is for node1"),
        (make_report(0, "running", job="other"), "is for job 'other'"),
        (
            make_report(0, "running", ranks=json.loads(make_report(0, "running"))["ranks"][:1]),
            "ranks do not match",
        ),
        (make_report(0, "running", created=float("nan")), "NaN"),
        (b"[" * 100_000, "recursion"),
        (b"\xff", "utf-8"),
    ],
)
def test_report_on_another_job_or_node_is_refused(tmp_path: Path, payload: bytes, reason: str) -> None:
    merger = Merger({0: 0, 1: 1}, folder=tmp_path, job="j")
    merger.attach(0)
    with pytest.raises(NodeError, match="node0 gave a malformed answer") as caught:
        merger.feed(0, MAGIC + make_frame(b"S", payload=payload))
    assert reason in caught.value.why


def test_oversized_frame_is_refused_by_its_header(tmp_path: Path) -> None:
    merger = Merger({0: 0}, folder=tmp_path)
    merger.attach(0)
    with pytest.raises(NodeError, match="the logs of node0 cannot be followed"):
        merger.feed(0, MAGIC + HEADER.pack(b"L", 0, 0, 2**32 - 1))


def test_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "rank3.log").symlink_to(tmp_path / "elsewhere")
    merger = Merger({3: 1}, folder=tmp_path)
    merger.attach(1)
    with pytest.raises(ConfigError, match="cannot write"):
        merger.feed(1, MAGIC + make_frame(b"L", 3, 0, b"text"))
    assert not (tmp_path / "elsewhere").exists()


NASTY = r"""
import os, random, sys, time
chance = random.Random(int(os.environ['RANK']))
out = sys.stdout.buffer
out.write(chance.randbytes(300_000)); out.flush()
out.write(b'x' * 10_000_000 + b'\n'); out.flush()
text = ('naïve 😀 ' * 5000 + '\n').encode()
while text:
    cut = chance.randrange(1, 5000)
    out.write(text[:cut]); out.flush(); text = text[cut:]
    time.sleep(0.005)
for number in range(20_000): out.write(b'line %d\n' % number)
out.write(b'no newline at the end'); out.flush()
"""


def test_several_followers_get_every_byte(fleet: "Fleet", tmp_path: Path) -> None:
    fleet.launch(NASTY)
    nodes = {rank.rank: rank.node for rank in fleet.ranks}
    mergers = [Merger(nodes, folder=tmp_path / name) for name in ("early", "late")]
    output = fleet.follow(mergers[0], 0) + fleet.follow(mergers[0], 1) + mergers[0].finish()
    for node in (0, 1):
        fleet.follow(mergers[1], node)
    assert all(merger.has_ended(node) for merger in mergers for node in (0, 1))
    for rank in range(4):
        digest = hashlib.sha256(fleet.log(rank)).hexdigest()
        assert len(fleet.log(rank)) > 10_300_000
        for name in ("early", "late"):
            assert hashlib.sha256((tmp_path / name / f"rank{rank}.log").read_bytes()).hexdigest() == digest
        label = b"[rank %d @ node%d] " % (rank, nodes[rank])
        assert label + b"x" * 100 not in output.replace(b"x" * 10_000_000, b"")
        assert output.count(label + b"line ") == 20_000
        assert label + b"no newline at the end\n" in output


PAUSES = r"""
import sys, time
for number in range(60_000): print('line', number)
sys.stdout.write('Name: '); sys.stdout.flush()
time.sleep(600)
"""


def test_line_is_split_only_by_a_pause_of_its_rank(fleet: "Fleet", tmp_path: Path) -> None:
    fleet.launch(PAUSES)
    clock = Clock()
    merger = Merger({rank.rank: rank.node for rank in fleet.ranks}, folder=tmp_path, clock=clock)
    process = fleet.start(1, messages.Follow(job="job", offsets=merger.attach(1)))
    assert process.stdout is not None
    output = b""
    while output.count(b"Name: ") < 2:
        clock.now += 5  # a network or a machine that stalls at every piece
        output += merger.feed(1, os.read(process.stdout.fileno(), 100_000))
    process.kill()
    process.communicate()
    for rank in (2, 3):
        label = b"[rank %d @ node1] " % rank
        lines = [line for line in output.splitlines(keepends=True) if line.startswith(label)]
        expected = [b"line %d\n" % number for number in range(60_000)]
        assert lines == [label + line for line in [*expected, b"Name: \n"]]


def test_last_lines_are_about_equally_many_of_each_rank() -> None:
    ranks = {rank: [b"[rank %d @ node0] line %d\n" % (rank, n) for n in range(100)] for rank in (0, 1, 2)}
    logs = [b"".join(lines) for lines in ranks.values()]
    assert last_lines(logs, 7) == b"".join((*ranks[0][-2:], *ranks[1][-2:], *ranks[2][-3:]))
    assert last_lines([*logs[:1], *ranks[2][:1]], 20) == b"".join((*ranks[0][-19:], ranks[2][0]))
    assert last_lines(logs, 2) == b"".join((ranks[1][-1], ranks[2][-1]))
    assert last_lines(logs, 1000) == b"".join(logs)
    assert last_lines([], 5) == b""


def test_tail_is_shown_from_its_start_and_never_written(tmp_path: Path) -> None:
    merger = Merger({3: 1}, folder=tmp_path / "logs", tail=2)
    assert merger.attach(1) == {3: 0}
    assert merger.feed(1, MAGIC + make_frame(b"L", 3, 10_000_000_000, b"two\nthr")) == LABEL + b"two\n"
    assert merger.attach(1) == {3: 10_000_000_007}  # where the next connection continues
    assert merger.feed(1, MAGIC + make_frame(b"L", 3, 10_000_000_007, b"ee\n")) == LABEL + b"three\n"
    with pytest.raises(NodeError, match="omitted 1 bytes of the log of rank 3"):
        merger.feed(1, make_frame(b"L", 3, 10_000_000_011, b"four\n"))
    assert not (tmp_path / "logs").exists()
