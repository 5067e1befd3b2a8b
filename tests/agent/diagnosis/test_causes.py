"""Each row of the table of causes is recognized by an example."""

import re
import signal
import types
from pathlib import Path

import pytest

from awsddp.agent.diagnosis.causes import CONDITIONS, TABLE, Evidence, explain
from awsddp.agent.diagnosis.evidence import last_lines, read_last_loss, read_tail
from awsddp.agent.diagnosis.job_causes import JOB_TABLE, NODE_FAULTS, Row
from awsddp.agent_client import program
from tests.support.rank_logs import GLOO, TRACEBACK, exception_log

PAGE = Path(__file__).parents[3] / "docs" / "why.md"
CRASH = """Fatal Python error: {}

Current thread 0x00007f1926e54b80 (most recent call first):
  File "x.py", line 2 in step
  File "x.py", line 9 in <module>
"""
ABORTED = 'Fatal Python error: Aborted\n File "x", line 2 in destroy_process_group\n'


NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp, "
)
# torch 2.13 on CPUs wrote these, except those with CUDA, NCCL or a driver: they are as published in the
# issues of pytorch, nccl and vllm.
RAISED = [
    (1, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "ecc_error", "memory"),
    (
        1,
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "driver_too_old",
        "does not fit",
    ),
    (
        1,
        "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
        "gpu_too_new",
        "not built",
    ),
    (1, "AssertionError: Torch not compiled with CUDA enabled", "no_gpu", "needs a GPU"),
    (1, "torch.AcceleratorError: CUDA error: device-side assert triggered", "cuda_error", "CUDA failed"),
    (
        1,
        f"{GLOO}device.cc:84] ifa != nullptr. Unable to find address for: ens3",
        "no_such_interface",
        "no network interface ens3 ",
    ),
    (
        1,
        NCCL + "internal error - please report this issue to the NCCL developers, NCCL version 2.26.2\n"
        "ncclInternalError: Internal check failed.\nLast error:\nBootstrap : no socket interface found",
        "no_such_interface",
        "no network interface",
    ),
    (
        1,
        NCCL + "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22703",
        "versions_differ",
        "rank 1 version 22705 rank 0 version 22703",
    ),
    (
        1,
        NCCL + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.25.1\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "nccl_error",
        "NCCL failed",
    ),
    (
        1,
        f"{GLOO}unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
        "gloo_timeout",
        "did not take part",
    ),
    (
        1,
        "torch.distributed.DistStoreError: Timed out after 26 seconds waiting for clients. 1/2 "
        "clients joined.",
        "rendezvous_timeout",
        "Only 1 of 2 ranks",
    ),
    (
        1,
        "torch.distributed.DistNetworkError: The client socket has timed out after 2000ms while trying to "
        "connect to (10.0.0.9, 29500).",
        "master_unreachable",
        "Nothing answers at 10.0.0.9, 29500",
    ),
    (
        1,
        "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address "
        "of (10.0.0.9, 29500). The client socket has failed to connect to 10.0.0.9:29500 (errno: 113 - No "
        "route to host).",
        "master_unreachable",
        "10.0.0.9, 29500",
    ),
    (
        1,
        "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 4 params, while rank 1 has "
        "inconsistent 3 params.",
        "model_differs",
        "different models",
    ),
    (
        1,
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
        "unused_parameters",
        "did not contribute to the loss",
    ),
    (
        1,
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_2_3_0>: No space left on "
        "device (28)",
        "shm_full",
        "/dev/shm",
    ),
    (1, "RuntimeError: DataLoader worker (pid(s) 25606) exited unexpectedly", "loader_died", "loader worker"),
    (1, "RuntimeError: Too many open files. Communication with the workers is no", "too_many_files", "open"),
    (1, "RuntimeError: can't start new thread", "too_many_processes", "limit of processes"),
    (1, "PermissionError: [Errno 13] Permission denied: '/data'", "permission", "not allowed to do this"),
    (1, "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure>", "no_internet", "internet"),
    (
        1,
        "RuntimeError: operator torchvision::nms does not exist",
        "packages_mismatch",
        "do not fit each other",
    ),
    (
        1,
        "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
        "library_missing",
        "the library libGL.so.1.",
    ),
    (
        1,
        "RuntimeError: Error downloading train-images-idx3-ubyte.gz:\n"
        "Tried https://ossci-datasets.s3.amazonaws.com/mnist/, got:\n"
        "<urlopen error [Errno -3] Temporary failure in name resolution>",
        "no_internet",
        "RuntimeError: Error downloading train-images-idx3-ubyte.gz. The node could not reach",
    ),
    (
        1,
        "RuntimeError: Couldn't load custom C++ ops. This can happen if your PyTorch and torchvision ",
        "packages_mismatch",
        "do not fit each other",
    ),
    (1, "SyntaxError: invalid syntax", "syntax_error", "The file is not valid"),
    (1, "RuntimeError: Error(s) in loading state_dict for Linear:", "checkpoint_differs", "another model"),
    (
        1,
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory.",
        "checkpoint_corrupt",
        "or is incomplete",
    ),
    (
        1,
        "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded\n"
        "\t(1) In PyTorch 2.6, we changed\n"
        "\tWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global",
        "checkpoint_refused",
        "torch.load refused",
    ),
    (
        1,
        "_pickle.UnpicklingError: Weights only load failed. In PyTorch 2.6, we changed\n"
        "Please file an issue with the following: WeightsUnpickler error: \n\nUnsupported operand 118",
        "checkpoint_corrupt",
        "not a checkpoint",
    ),
    (1, "_pickle.UnpicklingError: pickle data was truncated", "checkpoint_corrupt", "or is incomplete"),
    (
        1,
        "RuntimeError: Function 'SqrtBackward0' returned nan values in its 0th output.",
        "loss_not_finite",
        "finite",
    ),
    (1, "ValueError: the loss is nan at step 12", "loss_not_finite", "The loss was not a finite number."),
    (
        1,
        NCCL + "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.21.5\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 101c0",
        "same_gpu",
        "rank 1 and rank 0.",
    ),
    (
        1,
        NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'",
        "cuda_oom",
        "The GPU ran out of memory",
    ),
    (
        1,
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuda_oom",
        "GPU",
    ),
    (
        1,
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array with shape "
        "(1000000000000,) and data type float64",
        "host_oom",
        "The node ran out of memory",
    ),
    (
        1,
        "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by x.so)",
        "packages_mismatch",
        "do not fit",
    ),
    (1, "bdb.BdbQuit", "no_terminal", "waits for input from a keyboard"),
    (1, "EOFError: EOF when reading a line", "no_terminal", "waits for input from a keyboard"),
    (
        1,
        "wandb.errors.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[...])",
        "no_credentials",
        "no login",
    ),
]
NCCL_TIMEOUT = (
    """\
[rank0]:[E1218 20:27:21.484910731 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID 0(default_pg) Rank 0] failure
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: \
[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, \
NumelIn=131072000, NumelOut=131072000, Timeout(ms)=600000) ran for 600081 milliseconds before timing out.
Exception raised from checkTimeout at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:629
"""
    + "frame #1: <unknown function> + 0xc71f (0x7f47ed5d07bb in libtorch_cuda.so)\n" * 40
)
GLOO_MISMATCH = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] \
op.preamble.length <= op.nbytes. 4000 vs 4. Received data size doesn't match expected size. Is there a \
distributed collective mismatch in your code?
Fatal Python error: Aborted
"""
CALLED = (
    TRACEBACK + "subprocess.CalledProcessError: Command '['./run.sh']' returned non-zero exit status 127.\n"
)
EXAMPLES = [
    (3, "", "exit", "It ended with exit code 3."),
    (1, TRACEBACK + "ValueError: no\n", "exit", "ValueError: no."),
    (1, TRACEBACK.replace("\n", "\n[rank2]: ") + "ValueError: no\n[rank2]: \n", "exit", "ValueError: no."),
    (-6, TRACEBACK + "ValueError: no\nterminate called\n", "signal", "ValueError: no."),
    (1, "/usr/bin/python3: No module named pkg\n", "import_error", "pkg is not installed"),
    (1, "UserWarning: Failed to initialize NumPy: No module named 'numpy'\n", "exit", "exit code 1."),
    (1, TRACEBACK + "ModuleNotFoundError: No module named 'timm'\n", "import_error", "timm is not installed"),
    (
        1,
        TRACEBACK + "importlib.metadata.PackageNotFoundError: No package metadata was found for mine\n",
        "no_metadata",
        "mine is not installed for the python that runs the ranks: it has no metadata there.",
    ),
    (1, TRACEBACK + "importlib.metadata.PackageNotFoundError: my-lib\n", "no_metadata", "my-lib is not"),
    (
        1,
        TRACEBACK
        + "pkg_resources.DistributionNotFound: The 'mine' distribution was not found and is required\n",
        "no_metadata",
        "mine is not installed",
    ),
    (1, TRACEBACK + "FileNotFoundError: data\n", "file_not_found", "FileNotFoundError: data. The node does"),
    (1, TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried\n", "cuda_oom", "ran out of memory"),
    (1, TRACEBACK + "OSError: [Errno 98] Address already in use\n", "port_in_use", "in use on this node"),
    (1, TRACEBACK + "torch.distributed.DistNetworkError: failed to listen: EADDRINUSE\n", "port_in_use", ""),
    (1, TRACEBACK + "OSError: [Errno 28] No space left on device\n", "disk_full", "disk is full"),
    (1, TRACEBACK + "OSError: [Errno 12] Cannot allocate memory\n", "host_oom", "The node ran out"),
    (1, TRACEBACK + "RuntimeError: CUDA error: invalid device ordinal\n", "no_such_gpu", "does not have"),
    (-9, "", "killed", "SIGKILL. Killed from outside awsddp (by a user or a memory limit)."),
    (137, "", "killed", "exit code 137. Killed from outside awsddp"),
    (-11, CRASH.format("Segmentation fault"), "segfault", "SIGSEGV. A native library crashed at"),
    (139, "", "segfault", "It ended with exit code 139. A native library crashed."),
    (-4, CRASH.format("Illegal instruction"), "illegal_instruction", "processor lacks at x.py:2 in step."),
    (-64, "", "signal", "It was ended by SIGRTMAX."),
    (-50, "", "signal", "It was ended by signal 50."),
    (-7, CRASH.format("Bus error"), "bus_error", "is not accessible at x.py:2 in step: /dev/shm or a"),
    (120, "step 9\n", "output_lost", "stdout was closed, or the disk is full"),
    (-6, ABORTED, "abort_at_exit", "after its work was done"),
    (-6, "terminate called without an active exception\n", "abort_at_exit", "at its exit"),
    (-6, "terminate called", "abort", "It was ended by SIGABRT."),
    (1, TRACEBACK + "RuntimeError: [..] Connection closed by peer [127.0.0.1]:1\n", "peer_lost", ""),
    (1, TRACEBACK + "torch.distributed.DistBackendError: remote process exited\n", "peer_lost", ""),
    (-6, "terminate called\n  what():  [gloo] Connection reset by peer\n", "peer_lost", ""),
    (1, "Connection reset by peer\n" + TRACEBACK + "ValueError: no\n", "exit", "ValueError: no."),
    *((code, exception_log(text), kind, phrase) for code, text, kind, phrase in RAISED),
    (2, "usage: x.py [-h]\nx.py: error: unrecognized arguments: --local-rank=0\n", "usage", "its arguments"),
    (
        2,
        "/usr/bin/python3: can't open file '/w/outputs/1/train.py': [Errno 2] No such file or directory",
        "no_such_script",
        "Python did not find /w/outputs/1/train.py: the path is relative to the rank's first folder.",
    ),
    (
        1,
        f"/usr/bin/env: \u2018bash\\r\u2019: No such file or directory\n{CALLED}",
        "line_ends",
        '"bash\\r".',
    ),
    (126, "sh: ./run.sh: /bin/bash^M: bad interpreter: No such file or directory", "line_ends", '"bash\\r"'),
    (127, "awsddp could not start this process: [Errno 8] Exec format error\n", "not_started", "Exec format"),
    (-6, NCCL_TIMEOUT, "nccl_timeout", "ALLREDUCE did not end within NCCL's timeout"),
    (-6, GLOO_MISMATCH, "collective_mismatch", "different sizes"),
]


@pytest.mark.parametrize(("code", "text", "kind", "phrase"), EXAMPLES)
def test_end_of_a_rank_has_a_kind_and_an_explanation(code: int, text: str, kind: str, phrase: str) -> None:
    cause = explain(Evidence(code, text))
    assert (cause.kind, phrase in cause.explanation) == (kind, True), cause


def test_cause_has_no_escape_sequences_of_a_terminal(tmp_path: Path) -> None:
    log, red, reset = tmp_path / "rank0.log", "\x1b[1;31m", "\x1b[0m"
    link = "\x1b]8;;https://example.org\x1b\\here\x1b]8;;\x07"
    output = (
        TRACEBACK.replace("Traceback", f"{red}Traceback{reset}")
        + f"{red}ValueError{reset}: {link} \x1b[38;5;9mno\n"
    )
    log.write_text(output)
    text = read_tail(log)
    assert explain(Evidence(1, text)).explanation == "ValueError: here no."
    assert last_lines(text)[-1] == "ValueError: here no" and "\x1b" not in text


def test_tail_is_split_only_at_newlines() -> None:
    line = "a\x0bb\x0cc\x1cd\x85e\u2028f"
    assert last_lines(f"first\n{line}\n") == ["first", line]


@pytest.mark.parametrize("error", ["EOFError", "OSError: [Errno 22] Invalid argument"])
def test_bare_error_is_a_corrupt_checkpoint_only_in_torch(error: str) -> None:
    frames = TRACEBACK + '  File "/x/torch/serialization.py", line 900, in load\n'
    assert explain(Evidence(1, f"{frames}{error}\n")).kind == "checkpoint_corrupt"
    assert explain(Evidence(1, f"{TRACEBACK}{error}\n")).kind == "exit"


DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("first", "link", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", DIRECT, "cuda_oom"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", HANDLING, "cuda_oom"),
        (f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:49360", DIRECT, "peer_lost"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'cache'", HANDLING, "exit"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", "\n", "exit"),
    ],
)
def test_unspecific_exception_is_explained_by_the_one_before_it(first: str, link: str, kind: str) -> None:
    text = f"{TRACEBACK}{first}\n{link}{TRACEBACK}RuntimeError: step 12 failed\n"
    cause = explain(Evidence(1, exception_log(text)))
    assert cause.kind == kind, cause
    assert cause.explanation.startswith("RuntimeError: step 12 failed.")
    assert (first.rstrip(".") in cause.explanation) == (kind != "exit")


def test_cause_is_memory_if_the_kernel_killed_the_rank_for_it() -> None:
    cause = explain(Evidence(-9, "", oom_kills=1))
    assert (cause.kind, cause.retryable) == ("host_oom", False)
    assert "SIGKILL. The node ran out of memory, and its kernel killed the rank." in cause.explanation
    log = (
        "Memory cgroup out of memory: Killed process 15710 (python3) total-vm:221384kB, anon-rss:68096kB, "
        "file-rss:6684kB, shmem-rss:0kB, UID:0 pgtables:200kB oom_score_adj:0"
    )
    cause = explain(Evidence(-9, "", oom_kills=1, kernel=lambda: log))
    assert "killed process 15710 (python3), which used 0.0697 GB." in cause.explanation


@pytest.mark.parametrize(
    ("line", "kind", "phrase"),
    [
        ("79, pid=1234, name=python, GPU has fallen off the bus.", "xid", "GPU 0000:23:00 failed (Xid 79"),
        (
            "48, pid=1234, An uncorrectable double bit error",
            "ecc_error",
            "GPU 0000:23:00 has a fault (Xid 48",
        ),
        ("31, pid=1234, name=python, Ch 0000000a, MMU Fault", "cuda_error", "A call to CUDA failed"),
    ],
)
def test_fault_of_a_gpu_is_read_from_the_log_of_the_kernel(line: str, kind: str, phrase: str) -> None:
    log = f"NVRM: Xid (PCI:0000:23:00): {line}"
    text = exception_log("torch.AcceleratorError: CUDA error: unspecified launch failure")
    cause = explain(Evidence(1, text, kernel=lambda: log))
    assert (cause.kind, phrase in cause.explanation) == (kind, True), cause
    assert explain(Evidence(1, exception_log("ValueError: no"), kernel=lambda: log)).kind == "exit"


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (1, exception_log(f"{GLOO}pair.cc:144] Connection reset by peer [10.0.0.1]:4211"), ""),
        (1, exception_log(f"{GLOO}unbound_buffer.cc:88] Timed out waiting 1800000ms for recv operation"), ""),
        (1, exception_log(f"{NCCL}unhandled system error"), ""),
        (-6, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE)", ""),
        (-15, "", ""),
        (-11, "", "segfault"),
        (1, exception_log("ValueError: no"), "exit"),
        (1, exception_log("requests.exceptions.ConnectionError: Max retries exceeded"), "no_internet"),
    ],
)
@pytest.mark.parametrize(
    "line",
    [
        "ena 0000:00:05.0 ens5: Keep alive watchdog timeout.",
        "NETDEV WATCHDOG: ens5 (ena): transmit queue 2 timed out",
    ],
)
def test_failed_network_device_explains_lost_ranks_but_no_other_end(
    code: int, text: str, kind: str, line: str
) -> None:
    cause = explain(Evidence(code, text, kernel=lambda: f"{line}\n"))
    assert cause.kind == (kind or "network_failed"), cause
    assert (
        explain(Evidence(code, text, kernel=lambda: "ena 0000:00:05.0 ens5: link up")).kind
        != "network_failed"
    )


UNBOUND = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  "


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (1, exception_log(f"{NCCL}unhandled cuda error"), ""),
        (1, exception_log(f"{NCCL}remote process exited or there was a network error"), ""),
        (-6, f"{UNBOUND}Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)", ""),
        (-6, "Warning: destroy_process_group() was not called before the program exited\n", ""),
        (-15, "", ""),
        (1, exception_log("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"), "cuda_oom"),
        (
            1,
            exception_log("RuntimeError: [gloo/pair.cc:1] Connection closed by peer [10.0.0.1]"),
            "peer_lost",
        ),
        (1, exception_log("ValueError: no"), "exit"),
    ],
)
@pytest.mark.parametrize(("xid", "fault"), [(79, "xid"), (119, "xid"), (94, "ecc_error"), (95, "ecc_error")])
def test_failed_gpu_explains_every_end_of_its_nodes_ranks_but_the_programs_own(
    code: int, text: str, kind: str, xid: int, fault: str
) -> None:
    log = f"NVRM: Xid (PCI:0000:23:00): {xid}, pid=1234, name=python, a fault"
    assert explain(Evidence(code, text, kernel=lambda: log)).kind == (kind or fault)
    assert explain(Evidence(code, text)).kind not in NODE_FAULTS


def test_loss_that_is_not_finite_is_read_from_the_metrics(tmp_path: Path) -> None:
    rows = '{"rank": 1, "loss": NaN}\n{"loss": 0.5}\nno json\n{"rank": 1, "step": 2}\n{"rank": 1,'
    (tmp_path / "metrics.jsonl").write_text(rows)
    losses = [read_last_loss(tmp_path / "metrics.jsonl", rank, first=0) for rank in (0, 1, 2)]
    assert [str(loss) for loss in losses] == ["0.5", "nan", "None"]
    kinds = [explain(Evidence(1, exception_log("AssertionError"), loss=loss)).kind for loss in losses]
    assert kinds == ["exit", "loss_not_finite", "exit"]


def test_every_condition_is_known_and_its_pattern_compiles() -> None:
    for row in TABLE:
        assert row.conditions.keys() <= CONDITIONS.keys(), row.kind
        for condition, text in row.conditions.items():
            if condition in ("said", "log", "kernel", "network"):
                assert text
                assert re.compile(text)
            elif condition == "signal":
                assert signal.Signals[text]
            else:
                assert text.isdigit() == (condition == "code"), row.kind
    assert not any(row.conditions for row in JOB_TABLE)


def test_agent_gets_the_same_table() -> None:
    for name, table in (("diagnosis.causes", "TABLE"), ("diagnosis.job_causes", "JOB_TABLE")):
        module = types.ModuleType(f"awsddp.agent.{name}")
        exec(compile(program.module_source(name), name, "exec"), module.__dict__)
        assert list(map(tuple, getattr(module, table))) == list(map(tuple, globals()[table]))


def test_every_row_with_conditions_has_an_example() -> None:
    kinds = {row.kind for row in TABLE}
    assert kinds == {kind for *_, kind, _ in EXAMPLES} | {"xid", "network_failed"}
    assert all(re.fullmatch("[a-z][a-z_]+", row.kind) for row in (*TABLE, *JOB_TABLE))


def test_docs_list_the_causes() -> None:
    assert render_page() == PAGE.read_text(), "run: python -m tests.agent.diagnosis.test_causes"


def render_page() -> str:
    """Return docs/why.md with the list of causes as it is now."""
    begin, heading, rest = PAGE.read_text().partition("\n- `host_oom`:")
    assert heading
    rows = "".join(map(render_row, (*TABLE, *JOB_TABLE)))
    return f"{begin}\n{rows}\n{rest.partition(chr(10) * 2)[2]}"


def render_row(row: Row) -> str:
    text = (row.explanation or "It ended by itself.").replace("{{", "{").replace("}}", "}")
    return f"- `{row.kind}`{' (retryable)' if row.retryable else ''}: {text}\n"


if __name__ == "__main__":
    PAGE.write_text(render_page())
