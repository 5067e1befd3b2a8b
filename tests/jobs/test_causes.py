"""Each row of the table of causes is recognized by an example."""

import re

import pytest

from awsddp.jobs.supervisor.causes import TABLE, Evidence, cause_of_node, explain

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n'
ABORTED = 'Fatal Python error: Aborted\n File "x", line 2 in destroy_process_group\n'
EXAMPLES = [
    (3, "", "exit", "It ended with exit code 3."),
    (1, TRACEBACK + "ValueError: no\n", "exit", "ValueError: no."),
    (1, TRACEBACK.replace("\n", "\n[rank2]: ") + "ValueError: no\n[rank2]: \n", "exit", "ValueError: no."),
    (-6, TRACEBACK + "ValueError: no\nterminate called\n", "signal", "ValueError: no."),
    (1, "/usr/bin/python3: No module named pkg\n", "import_error", "pkg is not installed"),
    (1, "UserWarning: Failed to initialize NumPy: No module named 'numpy'\n", "exit", "exit code 1."),
    (1, TRACEBACK + "ModuleNotFoundError: No module named 'timm'\n", "import_error", "timm is not installed"),
    (1, TRACEBACK + "FileNotFoundError: data\n", "file_not_found", "FileNotFoundError: data. The node does"),
    (1, TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried\n", "cuda_oom", "ran out of memory"),
    (1, TRACEBACK + "OSError: [Errno 98] Address already in use\n", "port_in_use", "in use on this node"),
    (1, TRACEBACK + "torch.distributed.DistNetworkError: failed to listen: EADDRINUSE\n", "port_in_use", ""),
    (1, TRACEBACK + "OSError: [Errno 28] No space left on device\n", "disk_full", "disk is full"),
    (1, TRACEBACK + "OSError: [Errno 12] Cannot allocate memory\n", "host_oom", "The node ran out"),
    (1, TRACEBACK + "RuntimeError: CUDA error: invalid device ordinal\n", "no_such_gpu", "does not have"),
    (-9, "", "signal", "SIGKILL. Killed from outside awsddp (by a user or a memory limit)."),
    (137, "", "signal", "exit code 137. Killed from outside awsddp"),
    (-11, "", "signal", "It was ended by SIGSEGV."),
    (-64, "", "signal", "It was ended by SIGRTMAX."),
    (-50, "", "signal", "It was ended by signal 50."),
    (-7, "Bus error", "shm_full", "/dev/shm"),
    (-6, ABORTED, "abort_at_exit", "after its work was done"),
    (-6, "terminate called without an active exception\n", "abort_at_exit", "at its exit"),
    (-6, "terminate called", "signal", "It was ended by SIGABRT."),
    (1, TRACEBACK + "RuntimeError: [..] Connection closed by peer [127.0.0.1]:1\n", "peer_lost", ""),
    (1, TRACEBACK + "torch.distributed.DistBackendError: remote process exited\n", "peer_lost", ""),
    (-6, "terminate called\n  what():  [gloo] Connection reset by peer\n", "peer_lost", ""),
    (1, "Connection reset by peer\n" + TRACEBACK + "ValueError: no\n", "exit", "ValueError: no."),
]


@pytest.mark.parametrize(("code", "said", "kind", "words"), EXAMPLES)
def test_end_of_a_rank_has_a_kind_and_an_explanation(code: int, said: str, kind: str, words: str) -> None:
    cause = explain(Evidence(code, said))
    assert (cause["kind"], words in cause["explanation"]) == (kind, True), cause


def test_memory_is_the_cause_if_the_kernel_killed_for_it() -> None:
    cause = explain(Evidence(-9, "", oom_kills=1))
    assert (cause["kind"], cause["retryable"]) == ("host_oom", False)
    assert "SIGKILL. The node ran out of memory" in cause["explanation"]


def test_every_row_that_recognizes_has_an_example() -> None:
    recognized = {row.kind for row in TABLE if row.recognize}
    assert recognized == {kind for *_, kind, _ in EXAMPLES}
    assert all(re.fullmatch("[a-z][a-z_]+", row.kind) for row in TABLE)


def test_cause_of_a_node_names_its_instance_and_what_to_do() -> None:
    request = {"nodes": [{"node": 1, "instance_id": "i-1"}]}
    cause = cause_of_node(request, 1, "node_lost", why="node1 was lost")
    assert (cause["instance_id"], cause["explanation"], cause["retryable"]) == (
        "i-1",
        "node1 was lost.",
        True,
    )
    assert cause["next"].startswith("awsddp up")
    assert cause_of_node(request, None, "timeout", seconds=90.0)["node"] is None
