"""Whole screens of 80x24 and 120x40: the plan and its question, live rows, the output of a run."""

import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyte
import pytest

from awsddp.cli.command_line import Globals
from awsddp.cli.pages import run_page
from awsddp.cli.plan_page import launch_question
from awsddp.cli.screen import Screen
from awsddp.errors import Interrupted
from awsddp.model.documents import RunDocument
from awsddp.model.events import Event
from awsddp.plan.records import LaunchPlan, Step
from awsddp.settings.spec import ClusterSpec
from tests.support.plan_facts import FACTS, plan

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_run.json").read_text())
"""Events, lines and document of `awsddp run --local --nodes 2 --instance-type g6.xlarge`."""
SIZES = [(80, 24), (120, 40)]


class Terminal:
    """A terminal for stdin, stdout and stderr, with its screen and history."""

    def __init__(self, columns: int, rows: int) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=1.0)
        self.pty_fd, self.tty_fd = pty.openpty()
        fcntl.ioctl(self.tty_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        modes = termios.tcgetattr(self.tty_fd)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(self.tty_fd, termios.TCSANOW, modes)
        self._feeding = threading.Lock()
        self._reads = threading.Thread(target=self._read)
        self._reads.start()

    def _read(self) -> None:
        stream = pyte.ByteStream(self.screen)
        with contextlib.suppress(OSError):  # EIO is the end
            while data := os.read(self.pty_fd, 100_000):
                with self._feeding:
                    stream.feed(data)

    def lines(self) -> list[str]:
        """Return every line of screen and history after the program has ended."""
        self._reads.join(10)
        scrolled = [
            "".join(line[at].data for at in range(self.screen.columns)) for line in self.screen.history.top
        ]
        lines = [line.rstrip() for line in (*scrolled, *self.screen.display)]
        return lines[: max((at for at, line in enumerate(lines, 1) if line), default=0)]

    def wait(self, until: Callable[[list[str]], bool]) -> list[str]:
        """Return the lines on the screen once `until` accepts them."""
        deadline = time.perf_counter() + 10
        while True:
            with self._feeding:
                lines = [line.rstrip() for line in self.screen.display]
            if until(lines):
                return lines
            assert time.perf_counter() < deadline, lines
            time.sleep(0.01)


MakeTerminal = Callable[..., tuple[Terminal, Screen]]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTerminal]:
    """Return a function that makes a terminal and the screen of a verb on it."""
    with contextlib.ExitStack() as stack:

        def make(columns: int, rows: int, **options: Any) -> tuple[Terminal, Screen]:
            tty = Terminal(columns, rows)
            for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
                raw = io.FileIO(os.dup(tty.tty_fd), mode)
                stream = stack.enter_context(io.TextIOWrapper(raw, write_through=mode == "w"))
                monkeypatch.setattr(sys, name, stream)
            os.close(tty.tty_fd)
            for name, value in (("TERM", "xterm"), ("COLUMNS", columns), ("LINES", rows)):
                monkeypatch.setenv(name, str(value))
            return tty, stack.enter_context(contextlib.closing(Screen(Globals(**options))))

        yield make


def end(tty: Terminal, show: Screen) -> list[str]:
    """Close the screen; return its final lines."""
    show.close()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    return tty.lines()


def ask(tty: Terminal, show: Screen, launch: LaunchPlan) -> list[str]:
    """Return the lines of the question of `up`, answered with no."""
    os.write(tty.pty_fd, b"n\n")
    with contextlib.suppress(Interrupted):
        launch_question(show, ClusterSpec(name="demo"))(launch)
    return end(tty, show)


QUESTION = """\
2 x g6.48xlarge (8 L4 each), on-demand, in us-east-1: cluster demo
price    $26.75 per hour (list 2026-07-20), at most $642.11: expires after 24 h
ends     when idle for 60m, or after 24 h
image    torch 2.12, CUDA 13.0, Deep Learning OSS Nvidia Driver AMI GPU PyTorch…
creates  key pair, security group, placement group, 2 instances, 2 disks of 200…
details: awsddp plan
Launch this? [y/N]:\
"""


def test_the_plan_and_its_question_are_seven_lines(terminal: MakeTerminal) -> None:
    assert "\n".join(ask(*terminal(80, 24), plan(nodes=2))) == QUESTION


LONG = {
    "warnings": ("the AWS credentials end in 2 h, before the nodes do: " + "log in again by then " * 9,) * 8,
    "cluster": "a-name-of-a-cluster-that-is-as-long-as-it-may-be-0123456789-0123456789",
    "exists": True,
    "steps": (
        Step(do="open", value="203.0.113.7/32", why="203.0.113.7/32 is new, 198.51.100.0/24 is closed"),
        *(
            Step(do="end", numbers=(number,), instances=(f"i-{number:017x}",), why="2 nodes requested")
            for number in range(2, 64)
        ),
        Step(do="end", numbers=(0,), instances=("i-1",), why="AWS's status checks report it impaired"),
        Step(do="launch", numbers=(0, 1), why="node0, node1 ended"),
        Step(
            do="expire", instances=("i-1",), value="2026-11-27T00:00:00Z", why="the budget of $2,000,000.00"
        ),
    ),
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("cluster", [{"budget_usd": 300.0}, {"spot": True}, {"instance_type": "g5.48xlarge"}])
def test_a_long_question_fits_one_screen_and_names_each_end(
    terminal: MakeTerminal, cluster: dict[str, Any], columns: int
) -> None:
    made = plan(nodes=1, **cluster)
    launch = replace(made, alternatives=(made,) * 6, **LONG)
    lines = ask(*terminal(columns, 24), launch)
    assert len(lines) <= 24
    assert lines[-1] == "Do this? [y/N]:"
    facts = [line for line in lines if not line.startswith(("warning: ", "  "))][:-2]
    assert len(facts) <= 8
    assert all(len(line) <= columns for line in facts)
    changes = [line.removeprefix("changes  ") for line in lines if line.startswith("changes")]
    assert changes[0] == "end nodes 2-63: 2 nodes requested"
    assert changes[1].startswith("end node0 (i-1): AWS's status checks report it impaired")


def test_a_verbose_question_shows_the_whole_plan(terminal: MakeTerminal) -> None:
    lines = ask(*terminal(120, 60, verbose=1), plan(nodes=2))
    assert {"quota", "EFA", "zones", "placement"} <= {line.partition(" ")[0] for line in lines}


def plan_local(nodes: int = 2) -> LaunchPlan:
    image = replace(FACTS.image, tags={"awsddp:gpus": "rehearsed"})
    facts = replace(FACTS, target="local", image=image)
    return plan(facts, nodes=nodes, instance_type="g6.12xlarge")


def test_a_local_launch_has_no_question_unless_a_node_ends(
    terminal: MakeTerminal,
) -> None:
    lines = ask(*terminal(80, 24), plan_local())
    assert lines[:2] == [
        "2 nodes on this machine (rehearsed as g6.12xlarge, 4 L4 each)",
        "price    free; on EC2 it would be $9.26 per hour",
    ]
    assert len(lines) == 4
    ends = Step(do="end", numbers=(1,), instances=("i-1",), why="1 node requested")
    *_, last = ask(*terminal(80, 24), replace(plan_local(1), exists=True, steps=(ends,)))
    assert last == "Do this? [y/N]:"


@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_a_local_run_is_at_most_25_lines_in_chronological_order(
    terminal: MakeTerminal, columns: int, rows: int
) -> None:
    tty, show = terminal(columns, rows, yes=True)
    show.begin()
    launch_question(show, ClusterSpec(name="default"))(plan_local())
    for entry in RECORDED["output"]:
        if isinstance(entry, str):
            show.lines(f"{entry}\n".encode())
        else:
            show.show_event(Event(**entry))
    show.result(msgspec.convert(RECORDED["document"], RunDocument), run_page)
    lines = end(tty, show)
    messages = [line for line in lines if not line.startswith("[rank ")]
    assert len(messages) <= 25
    assert not set("".join(lines)) & set("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
    order = (
        *("ready: ", "synced: ", "runs 2 ranks: 2 nodes x 1 GPU", "Begin Training Epoch 1"),
        *("Epoch Summary: epoch 8", "fetched: ", "terminated i-", "succeeded", "nothing is left"),
    )
    positions = [next(at for at, line in enumerate(lines) if text in line) for text in order]
    assert positions == sorted(positions)
    assert sum(line.startswith("✓ node") for line in lines) == 8


def test_live_rows_fit_the_terminal_and_an_ended_row_becomes_a_line(
    terminal: MakeTerminal,
) -> None:
    tty, show = terminal(60, 10)
    text = "installing: " + "werkzeug, tqdm, protobuf, numpy, " * 5
    for node in range(64):
        show.show_event(Event(text, f"node{node}"))
    show.show_event(Event("sending 2 files, " + text, "node2", 0.25, 10**6))
    rows = tty.wait(lambda lines: "25 %" in lines[2] and lines[7].endswith("and 57 more"))
    assert [row.split()[1] for row in rows[:7]] == [f"node{node}" for node in range(7)]
    assert rows[1][1:].startswith(" node1 installing: werkzeug, tqdm, ") and "…" in rows[1]
    assert "…: 25 %, " in rows[2]
    show.show_event(Event("sending 2 files, 1 MB", "node1", 1.0, 10**6))  # rsync reports it more than once
    show.show_event(Event("ready", "node1", 1.0))
    show.say("a message")
    show.show_event(Event("ready", "node0", 1.0))
    assert end(tty, show) == ["✓ node1 ready", "a message", "✓ node0 ready"]


def test_a_wait_shows_its_duration(terminal: MakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    (tty, show), now = terminal(80, 24), time.monotonic()
    show.show_event(Event("importing torch, to compare the nodes", "node0"))
    monkeypatch.setattr("awsddp.cli.screen.time.monotonic", lambda: now + 75.5)
    tty.wait(lambda lines: lines[0].endswith("node0 importing torch, to compare the nodes (1 min 15 s)"))
    show.say("said")  # a message keeps the rows of nodes
    show.show_event(Event("asking AWS", ""))
    tty.wait(lambda lines: lines[0] == "said" and lines[1].endswith(" asking AWS"))
    show.show_event(Event("pending", "node1"))
    rows = tty.wait(lambda lines: lines[2].endswith(" node1 pending"))
    assert "asking AWS" not in "".join(rows)
    assert end(tty, show) == ["said"]


def test_a_verb_without_output_shows_that_it_works(terminal: MakeTerminal) -> None:
    tty, show = terminal(80, 24)
    show.begin()
    tty.wait(lambda lines: lines[0].endswith(" looking up cluster default"))
    show.say("found")
    tty.wait(lambda lines: lines[0] == "found" and lines[1].endswith(" working"))
    assert end(tty, show) == ["found"]


def test_a_job_without_new_lines_shows_that_it_runs(
    terminal: MakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("awsddp.cli.screen.LULL_S", 0.1)
    tty, show = terminal(80, 24)
    show.lines(b"[rank 0 @ node0] first\n")
    assert tty.wait(lambda lines: any("the job runs; no new line" in line for line in lines))
    show.lines(b"[rank 0 @ node0] second\n")
    assert end(tty, show) == ["[rank 0 @ node0] first", "[rank 0 @ node0] second"]
