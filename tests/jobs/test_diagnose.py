"""Exit codes and last words, explained."""

from pathlib import Path

import pytest

from awsddp.jobs.supervisor.diagnose import exception, explain, full_disk, is_echo, last_lines, read_tail

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n'


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (3, "", "It ended with exit code 3."),
        (1, TRACEBACK + "ValueError: no\n", "ValueError: no."),
        (1, TRACEBACK.replace("\n", "\n[rank2]: ") + "ValueError: no\n[rank2]: \n", "ValueError: no."),
        (-6, TRACEBACK + "ValueError: no\nterminate called\n", "ValueError: no."),
        (1, "/usr/bin/python3: No module named pkg\n", "pkg is not installed"),
        (1, "UserWarning: Failed to initialize NumPy: No module named 'numpy'\n", "exit code 1."),
        (1, TRACEBACK + "ModuleNotFoundError: No module named 'timm'\n", "timm is not installed"),
        (1, TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried\n", "smaller batch"),
        (1, TRACEBACK + "OSError: [Errno 98] Address already in use\n", "port"),
        (1, TRACEBACK + "OSError: [Errno 28] No space left on device\n", "disk is full"),
        (-9, "", "Killed (SIGKILL) by something outside awsddp"),
        (137, "", "Killed (SIGKILL) by something outside awsddp"),
        (-11, "", "It was ended by SIGSEGV."),
        (-64, "", "It was ended by SIGRTMAX."),
        (-50, "", "It was ended by signal 50."),
        (-7, "Bus error", "/dev/shm"),
        (
            -6,
            'Fatal Python error: Aborted\n File "x", line 2 in destroy_process_group\n',
            "after its work was done",
        ),
        (-6, "terminate called", "It was ended by SIGABRT."),
    ],
)
def test_end_is_explained(code: int, said: str, words: str) -> None:
    assert words in explain(code, said, oom_kills=0)


def test_memory_is_named_when_the_kernel_says_so() -> None:
    assert "out of memory" in explain(-9, "", oom_kills=1)


def test_last_traceback_of_a_chain_counts() -> None:
    said = (
        TRACEBACK
        + "KeyError: 1\n\nDuring handling of the above exception:\n\n"
        + TRACEBACK
        + "x.Y: 2\n[rank1]: z"
    )
    assert exception(said) == "x.Y: 2"
    assert exception("all is well") is None


@pytest.mark.parametrize(
    ("said", "echo"),
    [
        (TRACEBACK + "RuntimeError: [..] Connection closed by peer [127.0.0.1]:1\n", True),
        (TRACEBACK + "torch.distributed.DistBackendError: NCCL error: remote process exited\n", True),
        ("terminate called\n  what():  [gloo] Connection reset by peer\n", True),
        (TRACEBACK + "ValueError: no\n", False),
        ("Connection reset by peer\n" + TRACEBACK + "ValueError: no\n", False),
        ("", False),
    ],
)
def test_loss_of_a_peer_is_told_from_a_reason_of_its_own(said: str, echo: bool) -> None:
    assert is_echo(said) is echo


def test_tail_holds_twenty_lines_as_they_were_seen() -> None:
    lines = last_lines("".join(f"{number}\n" for number in range(50)) + "\r1%\r100%\r\n\n")
    assert lines == [*map(str, range(31, 50)), "100%"]
    assert last_lines("") == []
    assert len(last_lines("x" * 100_000)[0]) == 2000


def test_tail_of_a_log_that_is_not_there_says_so(tmp_path: Path) -> None:
    assert "cannot be read" in read_tail(tmp_path / "no.log")
    (tmp_path / "junk.log").write_bytes(b"\xff" * 100_000)
    assert len(read_tail(tmp_path / "junk.log")) == 64 * 1024


def test_disk_with_room_is_not_named(tmp_path: Path) -> None:
    assert full_disk(tmp_path, tmp_path / "nowhere") == ""
