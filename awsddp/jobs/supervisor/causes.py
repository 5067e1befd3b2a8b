"""Why a job ends: one row per cause, with its kind, recognizer, explanation and next step."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

from awsddp.jobs.supervisor.diagnose import exception, last_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    # Returns the values of the row's texts, None for another cause. Python 3.8 could not evaluate it.
    Recognizer = Callable[["Evidence"], "dict[str, str] | None"]


class Evidence:
    """What is known of a rank that ended.

    `exit_code` is -N for signal N, `text` the end of its log. `oom_kills` counts the processes that the
    kernel killed for memory while the job ran.
    """

    def __init__(self, exit_code: int, text: str, *, oom_kills: int = 0) -> None:
        self.exit_code = exit_code
        self.text = text
        self.oom_kills = oom_kills
        self.raised = exception(text)
        self.killed = exit_code in (-9, 137)

    def status(self) -> str:
        """Return how it ended, as a sentence."""
        if self.raised and self.exit_code in (1, -6):  # python exits with 1; torch may abort after it
            return self.raised if self.raised.endswith(".") else f"{self.raised}."
        if self.exit_code >= 0:
            return f"It ended with exit code {self.exit_code}."
        try:
            return f"It was ended by {signal.Signals(-self.exit_code).name}."
        except ValueError:
            return f"It was ended by signal {-self.exit_code}."


class Row(NamedTuple):
    """A cause. `retryable`: the same command may succeed without a change.

    Without `recognize` the supervisor names the kind itself, with the values of its texts.
    """

    kind: str
    retryable: bool
    recognize: Recognizer | None
    explanation: str
    next: str


def _said(pattern: str) -> Recognizer:
    """Recognize a pattern in the rank's last exception, or in the end of its log if there is none."""

    def recognize(evidence: Evidence) -> dict[str, str] | None:
        found = re.search(pattern, evidence.raised or "\n".join(last_lines(evidence.text)))
        return found.groupdict() if found else None

    return recognize


def _when(condition: Callable[[Evidence], object]) -> Recognizer:
    return lambda evidence: {} if condition(evidence) else None


# The first row that recognizes the end of a rank is its cause.
TABLE = (
    Row(
        "host_oom",
        False,
        _when(lambda one: one.killed and one.oom_kills),
        "The node ran out of memory, and its kernel killed the rank.",
        "use a smaller batch or fewer loader workers, or a larger --instance-type",
    ),
    Row(
        "signal",
        False,
        _when(lambda one: one.killed),
        "Killed from outside awsddp (by a user or a memory limit).",
        "",
    ),
    Row(
        "abort_at_exit",
        True,
        _when(
            lambda one: (
                one.exit_code == -6
                and not one.raised
                and re.search("destroy_process_group|terminate called without an active exception", one.text)
            )
        ),
        "It aborted after its work was done, at its exit: torch's gloo sometimes does.",
        "call torch.distributed.barrier() before destroy_process_group()",
    ),
    Row(
        "import_error",
        False,
        _said(r"(?:NotFoundError|python[\d.]*): No module named '?(?P<module>[\w.]+)"),
        "{module} is not installed for the python that runs the ranks.",
        "awsddp train --env requirements.txt   # which names its package",
    ),
    Row(
        "file_not_found",
        False,
        _said("^FileNotFoundError: "),
        "The node does not have this file.",
        "awsddp sync --dry-run   # what is sent, and what stays here",
    ),
    Row(
        "cuda_oom",
        False,
        _said("CUDA out of memory|CUDA error: out of memory"),
        "The GPU ran out of memory.",
        "use a smaller batch",
    ),
    Row(
        "port_in_use",
        True,
        _said("[Aa]ddress already in use|EADDRINUSE"),
        "A port that the script opens is in use on this node.",
        "awsddp exec 'ss -tlnp'   # shows which process has it; {{master_port}} is free for the script",
    ),
    Row(
        "disk_full",
        False,
        _said("No space left on device"),
        "The node's disk is full.",
        "awsddp up --disk GB   # a larger disk",
    ),
    Row(
        "host_oom",
        False,
        _said("Cannot allocate memory|DefaultCPUAllocator: can't allocate"),
        "The node ran out of memory.",
        "use a smaller batch or fewer loader workers, or a larger --instance-type",
    ),
    Row(
        "no_such_gpu",
        False,
        _said("invalid device ordinal"),
        "The script used a GPU that the node does not have.",
        "use the GPU of LOCAL_RANK, or fewer ranks: --nproc-per-node",
    ),
    Row(
        "shm_full",
        False,
        _said("insufficient shared memory|Bus error"),
        "/dev/shm is full.",
        "use fewer loader workers",
    ),
    # A rank that only lost its peers: no cause while another rank has a reason of its own.
    Row(
        "peer_lost",
        True,
        _said(
            r"Connection (reset|closed|refused)|[Cc]onnection was (reset|closed|likely)|Broken pipe"
            r"|remote process exited|ncclRemoteError|Socket closed|recvValue failed|sendBytes failed"
            r"|DistNetworkError|DistStoreError|got 0 bytes|Timed out (waiting|after)|TCPStore|peer has exited"
        ),
        "",
        "",
    ),
    Row("signal", False, _when(lambda one: one.exit_code < 0), "", ""),
    Row("exit", False, _when(lambda one: True), "", ""),
    Row("node_lost", True, None, "{why}.", "awsddp up   # replaces the node; then: awsddp train"),
    Row(
        "timeout",
        False,
        None,
        "The job ran for longer than its timeout of {seconds:g} s.",
        "awsddp train --timeout   # longer, if it was not hanging",
    ),
    Row(
        "hang",
        False,
        None,
        "No rank wrote to its log for {seconds:g} s.",
        "awsddp doctor --why {job}   # where each rank was",
    ),
    Row("cancelled", False, None, "It was cancelled.", ""),
    Row("interrupted", True, None, "{why}.", "awsddp up   # starts what is stopped; then: awsddp train"),
    Row(
        "expired",
        True,
        None,
        "{why}.",
        "awsddp up --expires   # starts the nodes with more time; then: awsddp train",
    ),
    Row("spot_interruption", True, None, "{why}.", "awsddp up   # replaces the node; then: awsddp train"),
)


def explain(evidence: Evidence) -> dict[str, Any]:
    """Return why a rank ended: `kind`, `retryable`, `explanation` and `next`."""
    recognized = ((row, row.recognize(evidence)) for row in TABLE if row.recognize)
    words = next(_words(row, values) for row, values in recognized if values is not None)
    return {**words, "explanation": f"{evidence.status()} {words['explanation']}".rstrip()}


def cause_of_node(request: dict[str, Any], node: int | None, kind: str, **values: Any) -> dict[str, Any]:
    """Return the cause of a job that none of its ranks ended; `values` are those of the row's texts."""
    return cause(request, node, _words(next(row for row in TABLE if row.kind == kind), values))


def cause(request: dict[str, Any], node: int | None, words: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the cause of a job as its document holds it. `words` are those of `explain`."""
    ids = {entry["node"]: entry["instance_id"] for entry in request["nodes"]}
    instance_id = None if node is None else ids[node]
    blank: dict[str, Any] = {"rank": None, "exit_code": None, "signal": None, "tail": []}
    return {**blank, "node": node, "instance_id": instance_id, **words, **more}


def _words(row: Row, values: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "retryable": row.retryable,
        "explanation": row.explanation.format(**values),
        "next": row.next.format(**values),
    }
