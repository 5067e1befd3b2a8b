"""Output to a terminal, a pipe and a JSON reader: tables of any width, progress, colours."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awsddp.cli import failures, screen
from awsddp.cli.command_line import Globals
from awsddp.cli.screen import Screen
from awsddp.cli.table import progress_text, table_lines
from awsddp.errors import NodeError
from awsddp.model.events import Event
from tests.util.test_terminal_safe import open_terminal

CELLS = st.lists(st.text("ab-/.4", min_size=1, max_size=20), min_size=1, max_size=6).map(" ".join)


@settings(deadline=None)
@given(st.lists(st.lists(CELLS, min_size=3, max_size=3), min_size=1, max_size=4), st.integers(8, 120))
def test_a_table_splits_no_word_and_fits_the_width(rows: list[list[str]], width: int) -> None:
    lines = table_lines(("job", "state", "results"), rows, columns=width)
    words = [word for row in rows for cell in row for word in cell.split()]
    assert set(words) <= {word for line in lines for word in line.split()}
    longest = [max(len(word) for row in rows for word in row[column].split()) for column in range(3)]
    if max(3, longest[0]) + max(5, longest[1]) + max(7, longest[2]) + 4 <= width:
        assert max(map(len, lines)) <= width
    else:
        assert [line.split()[0] for line in lines if line[0] != " "] == ["job"] * len(rows)


def transfer(done: float, who: str = "node0") -> Event:
    return Event("sending 2 files, 12 MB", who, done, 12_000_000)


def test_progress_shows_percent_rate_and_time_left() -> None:
    assert progress_text(transfer(0.25), 10) == "25 %, 300 kB/s, 30.0 s left"
    assert progress_text(transfer(0.0), 0) == "0 %"
    assert progress_text(Event("x", "node0", 0.5), 60) == "50 %, 1 min 0 s left"


def test_without_a_terminal_the_slowest_transfer_is_reported_every_interval(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show, now = Screen(Globals()), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        show.show_event(transfer(second / 30))
        show.show_event(transfer(second / 60, "node1"))
    show.show_event(Event("synced: 2 files, 12 MB", "node1", 1.0))
    assert capsys.readouterr().err.splitlines() == [
        "node0: sending 2 files, 12 MB",
        "node1: sending 2 files, 12 MB",
        "node1: sending 2 files, 12 MB: 15 %, 180 kB/s, 56.7 s left (the slowest of 2)",
        "node1: sending 2 files, 12 MB: 32 %, 190 kB/s, 43.2 s left (the slowest of 2)",
        "node1: synced: 2 files, 12 MB",
    ]


def test_a_terminal_shows_percent_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    show = Screen(Globals())
    show.show_event(transfer(0.0))
    show.show_event(transfer(0.5))
    show.pause()
    assert b"50 %, " in terminal()


def test_events_are_json_lines_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    show = Screen(Globals(json=True))
    show.show_event(Event("asking AWS"))
    show.show_event(transfer(0.1))
    show.show_event(transfer(0.2))  # within the same second: left out
    rows = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(row["schema"], row["who"], row["fraction"]) for row in rows] == [
        (1, None, None),
        (1, "node0", 0.1),
    ]


@pytest.mark.parametrize("value", ["1", ""])
def test_no_color_is_honoured_everywhere(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    terminal = open_terminal(monkeypatch)
    failures.show_error(NodeError("lost"))
    show = screen.Screen(Globals())
    show.lines(b"[rank 0 @ node0] \x1b[31mred\x1b[0m\n")
    show.show_event(Event("ready", "node0", 1.0))
    show.pause()
    shown = terminal()
    assert (b"\x1b[31m" in shown) == (value == "")
    assert (b"\x1b[32m" in shown) == (value == "")
