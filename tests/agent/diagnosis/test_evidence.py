"""The end of a log, and full disks."""

import subprocess
import sys
from pathlib import Path

import pytest

from awsddp.agent.diagnosis.evidence import describe_full_disk, find_exceptions, last_lines, read_tail
from tests.support.rank_logs import TRACEBACK


def test_exceptions_of_a_chain_are_listed_last_first() -> None:
    text = (
        TRACEBACK
        + "KeyError: 1\n\nDuring handling of the above exception:\n\n"
        + TRACEBACK
        + "x.Y: 2\n[rank1]: z"
    )
    assert find_exceptions(text) == ["x.Y: 2", "KeyError: 1"]
    assert find_exceptions("all is well") == []
    assert find_exceptions('  File "x.py", line 2\n    x = = 1\n        ^\nSyntaxError: no\n') == [
        "SyntaxError: no"
    ]


IGNORED = "Exception ignored in: <function Loader.__del__ at 0x7f>\n"
THREAD = "Exception in thread Thread-1 (pin):\n"


@pytest.mark.parametrize(
    "text",
    [
        TRACEBACK
        + "ValueError: no\n"
        + IGNORED
        + TRACEBACK
        + "AssertionError: can only test a child process\n",
        TRACEBACK + "ValueError: no\n" + THREAD + TRACEBACK + "ConnectionResetError: [Errno 104]\n",
        THREAD + TRACEBACK + "ValueError: no\n" + IGNORED + TRACEBACK + "AttributeError: x\n",
        TRACEBACK + "RuntimeError: Caught it in worker 0.\nOriginal " + TRACEBACK + "ValueError: no\n",
        "╭─── Traceback (most recent call last) ───╮\n│ x.py:3 in f │\n╰────╯\nValueError: no\n",
    ],
)
def test_exception_that_ended_the_program_is_listed_and_not_a_later_one(text: str) -> None:
    assert find_exceptions(text)[:1] == ["ValueError: no"]
    assert find_exceptions(IGNORED + TRACEBACK + "AttributeError: x\n") == []


def test_tail_has_twenty_lines_as_a_terminal_shows_them() -> None:
    lines = last_lines("".join(f"{number}\n" for number in range(50)) + "\r1%\r100%\r\n\n")
    assert lines == [*map(str, range(31, 50)), "100%"]
    assert last_lines("") == []
    simulated = (
        "rehearsal: 1 x NVIDIA L4 simulated: CUDA runs on the CPU, NCCL on gloo; speed is not tested\n"
    )
    assert last_lines(f"{simulated}Traceback\nValueError: no\n") == ["Traceback", "ValueError: no"]
    assert len(last_lines("x" * 100_000)[0]) == 2000


def test_tail_of_a_missing_log_has_the_error(tmp_path: Path) -> None:
    assert "cannot be read" in read_tail(tmp_path / "no.log")
    (tmp_path / "junk.log").write_bytes(b"\xff" * 100_000)
    assert len(read_tail(tmp_path / "junk.log")) == 64 * 1024


def test_disk_with_free_space_is_not_described_as_full(tmp_path: Path) -> None:
    assert describe_full_disk(tmp_path, tmp_path / "nowhere") == ""


def test_exception_inside_a_group_is_listed_and_not_the_group() -> None:
    script = """
import asyncio
async def fails():
    raise KeyError("batch")
async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
asyncio.run(main())
"""
    text = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr
    assert find_exceptions(text) == ["KeyError: 'batch'"]
    assert find_exceptions("before | all is well\n" + text)[0] == "KeyError: 'batch'"
    ranked = "".join(f"[rank2]: {line}" for line in text.splitlines(keepends=True))
    assert find_exceptions(ranked) == ["KeyError: 'batch'"]
    bare = [sys.executable, "-c", "raise ExceptionGroup('two', [ValueError(1), OSError(2)])"]
    text = subprocess.run(bare, capture_output=True, text=True, check=False).stderr
    assert find_exceptions(text) == ["ExceptionGroup: two (2 sub-exceptions)"]


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "x", line 1
  | ExceptionGroup: held (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "x", line 2
    | KeyError: 'held'
    +------------------------------------
"""
CHAIN = (
    TRACEBACK
    + "KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
    + TRACEBACK
    + "OSError: 2\n"
)


@pytest.mark.parametrize("header", [IGNORED, THREAD])
@pytest.mark.parametrize("text", [GROUP, CHAIN])
def test_chain_of_an_ignored_exception_or_of_a_thread_is_not_the_end_of_the_program(
    header: str, text: str
) -> None:
    assert find_exceptions(TRACEBACK + "ValueError: no\n" + header + text) == ["ValueError: no"]
    assert find_exceptions(text + header + text) == find_exceptions(text)
    assert (find_exceptions(header + text) == []) is (header == IGNORED)
