"""The end of a log, and full disks."""

import subprocess
import sys
from pathlib import Path

import pytest

from awsddp.agent.diagnosis.evidence import describe_full_disk, find_exceptions, last_lines, read_tail
from tests.support.rank_logs import TRACEBACK


def test_last_traceback_of_a_chain_counts() -> None:
    said = (
        TRACEBACK
        + "KeyError: 1\n\nDuring handling of the above exception:\n\n"
        + TRACEBACK
        + "x.Y: 2\n[rank1]: z"
    )
    assert find_exceptions(said) == ["x.Y: 2", "KeyError: 1"]
    assert find_exceptions("all is well") == []
    assert find_exceptions('  File "x.py", line 2\n    x = = 1\n        ^\nSyntaxError: no\n') == [
        "SyntaxError: no"
    ]


IGNORED = "Exception ignored in: <function Loader.__del__ at 0x7f>\n"
THREAD = "Exception in thread Thread-1 (pin):\n"


@pytest.mark.parametrize(
    "said",
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
def test_exception_that_ended_the_program_counts_and_no_later_one(said: str) -> None:
    assert find_exceptions(said)[:1] == ["ValueError: no"]
    assert find_exceptions(IGNORED + TRACEBACK + "AttributeError: x\n") == []


def test_tail_holds_twenty_lines_as_they_were_seen() -> None:
    lines = last_lines("".join(f"{number}\n" for number in range(50)) + "\r1%\r100%\r\n\n")
    assert lines == [*map(str, range(31, 50)), "100%"]
    assert last_lines("") == []
    simulated = (
        "rehearsal: 1 x NVIDIA L4 simulated: CUDA runs on the CPU, NCCL on gloo; speed is not tested\n"
    )
    assert last_lines(f"{simulated}Traceback\nValueError: no\n") == ["Traceback", "ValueError: no"]
    assert len(last_lines("x" * 100_000)[0]) == 2000


def test_tail_of_a_log_that_is_not_there_says_so(tmp_path: Path) -> None:
    assert "cannot be read" in read_tail(tmp_path / "no.log")
    (tmp_path / "junk.log").write_bytes(b"\xff" * 100_000)
    assert len(read_tail(tmp_path / "junk.log")) == 64 * 1024


def test_disk_with_room_is_not_named(tmp_path: Path) -> None:
    assert describe_full_disk(tmp_path, tmp_path / "nowhere") == ""


def test_what_an_exception_group_holds_is_the_cause() -> None:
    script = """
import asyncio
async def fails():
    raise KeyError("batch")
async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
asyncio.run(main())
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr
    assert find_exceptions(said) == ["KeyError: 'batch'"]
    assert find_exceptions("before | all is well\n" + said)[0] == "KeyError: 'batch'"
    ranked = "".join(f"[rank2]: {line}" for line in said.splitlines(keepends=True))
    assert find_exceptions(ranked) == ["KeyError: 'batch'"]
    bare = [sys.executable, "-c", "raise ExceptionGroup('two', [ValueError(1), OSError(2)])"]
    said = subprocess.run(bare, capture_output=True, text=True, check=False).stderr
    assert find_exceptions(said) == ["ExceptionGroup: two (2 sub-exceptions)"]


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


@pytest.mark.parametrize("whose", [IGNORED, THREAD])
@pytest.mark.parametrize("said", [GROUP, CHAIN])
def test_what_follows_an_exception_of_a_thread_or_an_ignored_one_is_no_more_than_that(
    whose: str, said: str
) -> None:
    assert find_exceptions(TRACEBACK + "ValueError: no\n" + whose + said) == ["ValueError: no"]
    assert find_exceptions(said + whose + said) == find_exceptions(said)
    assert (find_exceptions(whose + said) == []) is (whose == IGNORED)
