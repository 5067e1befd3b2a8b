"""Output of a node cannot control the terminal that shows it."""

import contextlib
import io
import os
import pty
import sys
from collections.abc import Callable

import pytest

from awsddp.cli import failures, table
from awsddp.cli.command_line import Globals
from awsddp.cli.screen import Screen
from awsddp.errors import NodeError
from awsddp.model.events import Event
from awsddp.util import terminal_safe

NASTY = "a\x1b]0;owned\x07b\x1b[2Jc\x9bd\u202ee\udcfff\rg\x08\u2028h"
SHOWN = r"a\x1b]0;owned\x07b\x1b[2Jc\x9bd\u202ee\xfff\x0dg\x08\u2028h"


def test_control_characters_are_made_visible() -> None:
    assert terminal_safe.escape_line(NASTY + "\ti\n") == SHOWN + "\ti\\n"
    assert terminal_safe.escape_lines(NASTY + "\n") == SHOWN + "\n"
    assert terminal_safe.escape_line("naïve 😀 日本 שלום") == "naïve 😀 日本 שלום"


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        (b"\x1b[1;31mred\x1b[0m \x1b[38:5:2mx\n", b"\x1b[1;31mred\x1b[0m \x1b[38:5:2mx\x1b[0m\n"),
        (b"\x1b[30;40mhidden\nnext\r\n", b"\x1b[30;40mhidden\x1b[0m\nnext\r\n"),
        (b"\x1b[32mdone\r\n", b"\x1b[32mdone\x1b[0m\r\n"),
        (b"\x1b[8mpassword", rb"\x1b[8mpassword"),
        (b"\x1b[1;08m\x1b[138;5;8m\x1b[38;5;1;8mx", rb"\x1b[1;08m\x1b[138;5;8m\x1b[38;5;1;8mx"),
        (b"\x1b[38;5;8;48;2;8;8;8mgrey", b"\x1b[38;5;8;48;2;8;8;8mgrey\x1b[0m"),
        ("a\u202eb\u2066c\u2069d\u200fe\u061cf".encode(), rb"a\u202eb\u2066c\u2069d\u200fe\u061cf"),
        (b"a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c\x1b]52;c;Zm9v\n", b"abc\n"),
        (b"a\x1b[2Jb\x1b[10;10Hc\x1b[?1049hd\x1b[6ne\x1b[Kf\x1b[A", b"abcdef"),
        (b"a\x1bPdevice\x1b\\b\x1bcc\x1b", rb"ab\x1bcc\x1b"),
        (b"a\x07\x08\x00\x7f", rb"a\x07\x08\x00\x7f"),
        (b"a\rb\r\n\tc", rb"a\x0db" + b"\r\n\tc"),
        ("é\x9b31mÀ\n".encode(), "é".encode() + rb"\xc2\x9b31m" + "À\n".encode()),
        ("naïve 😀\n".encode(), "naïve 😀\n".encode()),
        (b"\xff\xfe binary\n", b"\xff\xfe binary\n"),
    ],
)
def test_a_terminal_gets_only_colours_and_text_of_the_output_of_a_rank(raw: bytes, safe: bytes) -> None:
    assert terminal_safe.keep_colours(raw) == safe


def test_an_error_a_table_and_an_event_escape_the_text_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    failures.show_error(NodeError(NASTY + "\nnext: rm -rf", f"why {NASTY}\nmore", NASTY))
    table.table(("name",), [[NASTY]])
    table.line(NASTY)
    Screen(Globals()).show_event(Event(NASTY + "\n", "node1"))
    Screen(Globals()).show_event(Event(NASTY))
    output = capsys.readouterr()
    for text in (output.out, output.err):
        assert SHOWN in text
        assert not set(text) & set("\x1b\x9b\u202e\udcff\r\x08\x07")
    assert "\nnext: rm" not in output.err


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bytes]:
    """Make stdout and stderr a terminal, and return a function that reads what was written."""
    leader, follower = pty.openpty()
    stream = io.TextIOWrapper(io.FileIO(follower, "w"), write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")

    def read_output() -> bytes:
        stream.close()
        output = b""
        with contextlib.suppress(OSError):  # EIO is the end
            while data := os.read(leader, 100_000):
                output += data
        os.close(leader)
        return output

    return read_output


def test_a_terminal_gets_no_sequences_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    Screen(Globals()).lines(b"[rank 0 @ node0] \x1b[31ma\x1b[0m\x1b]0;owned\x07b\n")
    assert terminal() == b"[rank 0 @ node0] \x1b[31ma\x1b[0mb\x1b[0m\r\n"


def test_live_lines_take_no_markup_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    show = Screen(Globals())
    show.show_event(Event("x[/nothing][red]y", "node[/b]1"))
    show.pause()
    assert b"x[/nothing][red]y" in terminal()


def test_a_pipe_gets_every_byte_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out))
    data = b"\x1b]0;owned\x07\x1b[2J\xff\n"
    Screen(Globals()).lines(data)
    assert out.getvalue() == data


def test_a_question_escapes_the_text_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", lambda question, **_: questions.append(question))
    Screen(Globals()).confirm(NASTY)
    assert questions == [SHOWN]
