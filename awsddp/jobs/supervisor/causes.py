"""Why a rank ended: one row per cause, with its kind, recognizer, explanation and next step."""

from __future__ import annotations

import math
import re
import signal
from typing import TYPE_CHECKING, Any

from awsddp.jobs.supervisor.diagnose import exceptions, last_lines
from awsddp.jobs.supervisor.job_causes import TIMED_OUT, Row, words_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from awsddp.jobs.supervisor.job_causes import Recognizer

_MORE_LINES = 8  # the error of NCCL, and of torch.load, follows in the lines after the exception
_PLACE = re.compile(r'^Current thread .*\n +File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_OOM = re.compile(r"Killed process (\d+) \(([^)]*)\).*?anon-rss:(\d+)kB")


class Evidence:
    """What is known of a rank that ended.

    `exit_code` is -N for signal N, `text` the end of its log, `loss` the last one in its metrics. `oom_kills`
    counts the processes that the kernel killed for memory while the job ran; `kernel` returns what the kernel
    has logged in that time.
    """

    def __init__(
        self,
        exit_code: int,
        text: str,
        *,
        oom_kills: int = 0,
        loss: object = None,
        kernel: Callable[[], str] = str,
    ) -> None:
        self.exit_code = exit_code
        self.text = text
        self.oom_kills = oom_kills
        self.kernel = kernel
        chain = exceptions(text)
        self.raised = chain[0] if chain else None
        self.earlier = chain[1:]
        self.signal = -exit_code if exit_code < 0 else max(0, exit_code - 128)
        self.killed = self.signal == signal.SIGKILL
        self.diverged = isinstance(loss, float) and not math.isfinite(loss)
        self.said = self._said()

    def _said(self) -> str:
        """Return what the rank said of its end: its last exception, or else the end of its log."""
        if self.raised and re.search("NCCL|Weights only", self.raised):
            return "\n".join((self.raised + self.text.rpartition(self.raised)[2]).split("\n")[:_MORE_LINES])
        _, aborted, after = self.text.rpartition("terminate called")
        return self.raised or (aborted + after if aborted else "\n".join(last_lines(self.text)))

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


def _when(condition: Callable[[Evidence], object]) -> Recognizer:
    return lambda evidence: {} if condition(evidence) else None


def _logged(pattern: str) -> Recognizer:
    """Recognize a pattern in the kernel's log, if the rank used a GPU or was ended by a signal."""

    def recognize(evidence: Evidence) -> dict[str, str] | None:
        asked = evidence.signal or re.search("CUDA|NCCL|cuda", evidence.said)
        found = re.search(pattern, evidence.kernel()) if asked else None
        return found.groupdict() if found else None

    return recognize


def _out_of_memory(evidence: Evidence) -> dict[str, str] | None:
    """Recognize a rank, or a loader worker of it, that the kernel killed for memory."""
    loader = re.search(r"DataLoader worker \(pid.*signal: Killed", evidence.text)
    if not (evidence.oom_kills and (evidence.killed or loader)):
        return None
    kills = _OOM.findall(evidence.kernel())
    if not kills:
        return {"victim": "the rank"}
    pid, name, kilobytes = kills[-1]
    return {"victim": f"process {pid} ({name}), which used {int(kilobytes) * 1024 / 1e9:.3g} GB"}


def _not_whole(evidence: Evidence) -> dict[str, str] | None:
    """Recognize a checkpoint that is cut, or another file (a page of the web, a pointer of Git LFS)."""
    in_torch = "torch/serialization.py" in evidence.text and r"|^EOFError$|^OSError: \[Errno 22\]"
    found = re.search(f"{_NOT_WHOLE}{in_torch or ''}", evidence.said)
    return {} if found else None


_NOT_WHOLE = (
    "PytorchStreamReader failed|invalid magic number|^EOFError: Ran out of input|unexpected EOF, expected"
    "|Unsupported operand|invalid load key|pickle data was truncated|File is not a zip file"
    "|deserializing header"
)


_NOT_FINITE = r"(?i)\bloss\b.*\b(nan|inf)\b|\bnan\b.*\bloss\b|returned nan values"
_SHM_FULL = "insufficient shared memory|out of shared memory|unable to allocate shared"


def _crashed(number: signal.Signals, pattern: str = "") -> Recognizer:
    """Recognize a rank that a signal ended without an exception, with `pattern` in its log; name its line."""

    def recognize(evidence: Evidence) -> dict[str, str] | None:
        if evidence.signal != number or evidence.raised or not re.search(pattern, evidence.text):
            return None
        places = _PLACE.findall(evidence.text)
        return {"place": " at {}:{} in {}".format(*places[-1]) if places else ""}

    return recognize


_REPLACE_GPU = (
    "awsddp doctor   # checks the GPUs of each node; retry on other instances: awsddp down, awsddp up"
)
_PACKAGES = "awsddp train --env requirements.txt   # versions that belong together, on every node"
_WHO_WAITED = "awsddp logs   # what the others did; while a job hangs: awsddp doctor --why"
_LESS_MEMORY = "use a smaller batch or fewer loader workers, or a larger --instance-type"

# The first row that recognizes the end of a rank is its cause: by a pattern in the rank's last exception, or
# in the end of its log if there is none, or by a function.
TABLE = (
    Row(
        "host_oom",
        _out_of_memory,
        "The node ran out of memory, and its kernel killed {victim}.",
        _LESS_MEMORY,
    ),
    Row(
        "killed",
        _when(lambda one: one.killed),
        "Killed from outside awsddp (by a user or a memory limit).",
    ),
    Row(
        "abort_at_exit",
        _crashed(signal.SIGABRT, "destroy_process_group|terminate called without an active exception"),
        "It aborted after its work was done, at its exit: torch's gloo sometimes does.",
        "call torch.distributed.barrier() before destroy_process_group()",
        retryable=True,
    ),
    Row(
        "import_error",
        r"(?:NotFoundError|python[\d.]*): No module named '?(?P<module>[\w.]+)",
        "{module} is not installed for the python that runs the ranks.",
        "awsddp train --env requirements.txt   # which names its package",
    ),
    Row(
        "file_not_found",
        "^FileNotFoundError: ",
        "The node does not have this file.",
        "awsddp sync -v   # what is sent, and what stays here",
    ),
    Row(
        "cuda_oom",
        "CUDA out of memory|CUDA error: out of memory|Cuda failure 2 'out of memory'"
        "|CU(BLAS|DNN)_STATUS_ALLOC_FAILED",
        "The GPU ran out of memory.",
        "use a smaller batch",
    ),
    Row(
        "ecc_error",
        "uncorrectable ECC error",
        "The GPU's memory has a fault.",
        _REPLACE_GPU,
        retryable=True,
    ),
    # Xids that name the hardware; most others are the program's own.
    # https://docs.nvidia.com/deploy/xid-errors/
    Row(
        "ecc_error",
        _logged(r"NVRM: Xid \(PCI:(?P<gpu>[\w:.]+)\): (?P<xid>48|63|64|94|95)\b"),
        "The memory of GPU {gpu} has a fault (Xid {xid} in the kernel's log).",
        _REPLACE_GPU,
        retryable=True,
    ),
    Row(
        "xid",
        _logged(r"NVRM: Xid \(PCI:(?P<gpu>[\w:.]+)\): (?P<xid>62|74|79|119|120|140)\b,? ?(?P<text>[^\n]*)"),
        "GPU {gpu} failed (Xid {xid} in the kernel's log: {text}).",
        _REPLACE_GPU,
        retryable=True,
    ),
    Row(
        "driver_too_old",
        "driver on your system is too old|driver version is insufficient|Driver/library version mismatch",
        "The node's NVIDIA driver does not fit this torch.",
        "awsddp plan   # names the driver and the torch that fit; or omit torch from the requirements",
    ),
    Row(
        "gpu_too_new",
        "no kernel image is available",
        "This torch was not built for the node's GPU.",
        "install a newer torch, or choose another --instance-type",
    ),
    Row(
        "no_such_gpu",
        "invalid device ordinal",
        "The script used a GPU that the node does not have.",
        "use the GPU of LOCAL_RANK, or fewer ranks: --nproc-per-node",
    ),
    Row(
        "same_gpu",
        r"Duplicate GPU detected : (?P<ranks>rank \d+ and rank \d+)",
        "The ranks use the same GPU: {ranks}.",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), before the first use of a GPU",
    ),
    Row(
        "no_gpu",
        "Torch not compiled with CUDA|NCCL support is not compiled|doesn't have NCCL built in"
        "|Found no NVIDIA driver|No CUDA GPUs are available|no GPUs found",
        "The script needs a GPU, and this node or its torch has none.",
        "choose an --instance-type with GPUs, or the backend: nccl if torch.cuda.is_available() else gloo",
    ),
    Row(
        "no_such_interface",
        r"Unable to find address for: (?P<name>\S+)|no socket interface found",
        "The node has no network interface {name} (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
        "remove these variables from the script and from [env]: awsddp sets the right ones on every node",
    ),
    Row(
        "versions_differ",
        "Mismatched NCCL version detected : (?P<versions>[^\n]+)",
        "The nodes have different versions of NCCL: {versions}.",
        _PACKAGES,
    ),
    Row(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout: .*OpType=(?P<operation>\w+)",
        "{operation} did not end within NCCL's timeout: another rank did not take part.",
        _WHO_WAITED,
        retryable=True,
    ),
    Row(
        "gloo_timeout",
        r"Timed out waiting \d+ms for (?:send|recv) operation|monitoredBarrier",
        "Another rank did not take part in the collective within the timeout.",
        _WHO_WAITED,
        retryable=True,
    ),
    Row(
        "rendezvous_timeout",
        r"(?P<joined>\d+)/(?P<all>\d+) clients joined",
        "Only {joined} of {all} ranks joined the process group in time.",
        _WHO_WAITED,
        retryable=True,
    ),
    Row(
        "master_unreachable",
        r"client socket has (?:timed out|failed).*? connect to [^(]*\((?P<place>[^)]+)\)",
        "Nothing answers at {place}, where rank 0 was expected.",
        "use MASTER_ADDR and MASTER_PORT, or {{master_addr}} and {{master_port}} in the script's arguments",
    ),
    Row(
        "collective_mismatch",
        "Detected mismatch between collectives|Received data size doesn't match|preamble.length <= ",
        "The ranks called different collectives, or the same with other sizes.",
        "awsddp train --env-var TORCH_DISTRIBUTED_DEBUG=DETAIL   # names the collective",
    ),
    Row(
        "model_differs",
        "DDP expects same model across all ranks|appears not to match",
        "The ranks built different models.",
        "build the model from the same settings and the same seed on every rank",
    ),
    Row(
        "unused_parameters",
        "Expected to have finished reduction in the prior iteration",
        "Some parameters did not contribute to the loss.",
        "DistributedDataParallel(model, find_unused_parameters=True), or remove them",
    ),
    Row(
        "shm_full",
        _when(lambda one: re.search(_SHM_FULL, one.text)),
        "/dev/shm is full.",
        "use fewer loader workers",
    ),
    Row(
        "bus_error",
        _crashed(signal.SIGBUS),
        "Mapped memory had nothing behind it{place}: /dev/shm or a disk is full, or a mapped file was cut.",
        "use fewer loader workers; replace a data file with os.replace() instead of writing into it",
    ),
    Row(
        "loader_died",
        r"DataLoader worker \(pid",
        "A loader worker of the rank died.",
        "use fewer loader workers, which take memory each; num_workers=0 shows an error as an exception",
    ),
    Row(
        "port_in_use",
        "[Aa]ddress already in use|EADDRINUSE",
        "A port that the script opens is in use on this node.",
        "awsddp exec 'ss -tlnp'   # shows which process has it; {{master_port}} is free for the script",
        retryable=True,
    ),
    Row(
        "disk_full",
        "No space left on device|Disk quota exceeded",
        "The node's disk is full.",
        "awsddp down && awsddp up --disk GB   # a larger disk",
    ),
    Row(
        "host_oom",
        "Cannot allocate memory|DefaultCPUAllocator: can't allocate|^MemoryError|std::bad_alloc"
        r"|Unable to allocate .* for an array",
        "The node ran out of memory.",
        _LESS_MEMORY,
    ),
    Row(
        "too_many_files",
        "Too many open files",
        "The rank has too many open files.",
        "use fewer loader workers, or: torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    Row(
        "too_many_processes",
        "can't start new thread|Resource temporarily unavailable",
        "The node's limit of processes and threads is reached.",
        "use fewer loader workers and threads (OMP_NUM_THREADS)",
    ),
    Row(
        "permission",
        "^PermissionError|Permission denied|Read-only file system",
        "The user of the ranks may not do this.",
        "write to $AWSDDP_RUN_DIR or the synced folder",
    ),
    Row(
        "no_internet",
        "name resolution|Name or service not known|urlopen error|Max retries exceeded",
        "The node could not reach a host on the internet.",
        "awsddp exec -- curl -sSI https://pypi.org   # from each node; or sync the data with the folder",
        retryable=True,
    ),
    Row(
        "packages_mismatch",
        "torchvision::nms does not exist|undefined symbol|may indicate binary incompat|cannot import name"
        r"|version `\S+' not found",
        "Two packages of the node's environment do not fit each other.",
        _PACKAGES,
    ),
    Row(
        "library_missing",
        r"(?P<library>\S+): cannot open shared object file",
        "The node does not have the library {library}.",
        "env.setup in awsddp.toml   # a command that installs it on every node",
    ),
    Row(
        "syntax_error",
        "^(?:Syntax|Indentation|Tab)Error",
        "The file is not valid for the node's Python.",
        "awsddp exec -- python3 --version   # the node's; it may be older than yours",
    ),
    Row(
        "usage",
        _when(lambda one: one.exit_code == 2 and re.search(r"^\S+: error: ", one.said, re.MULTILINE)),
        "The script refused its arguments.",
        "awsddp train SCRIPT -- ARGUMENTS   # those of the script follow --; LOCAL_RANK is a variable",
    ),
    Row(
        "no_terminal",
        "^bdb.BdbQuit|^EOFError: EOF when reading a line",
        "The script waits for a keyboard, and a rank has none.",
        "remove breakpoint() and input()",
    ),
    Row(
        "no_credentials",
        "api_key not configured|Unable to locate credentials|NoCredentialsError|GatedRepoError"
        "|401 Client Error|No API key",
        "The rank has no login for this service.",
        "awsddp train --env-var NAME   # a secret (WANDB_API_KEY, HF_TOKEN, ...): its value is read here",
    ),
    Row(
        "not_started",
        "awsddp could not start this (?:process|rank): (?P<why>[^\n]+)",
        "{why}.",
    ),
    Row(
        "checkpoint_differs",
        r"Error\(s\) in loading state_dict",
        "The checkpoint is of another model.",
        "use the model's settings of the job that saved it, or start without --resume",
    ),
    Row(
        "checkpoint_corrupt",
        _not_whole,
        "The file is not a checkpoint, or not a whole one.",
        "awsddp train --resume JOB   # from an older one; write it under another name, then os.replace()",
    ),
    Row(
        "checkpoint_refused",
        "Weights only load failed",
        "torch.load refused objects in the file that are not tensors.",
        "torch.load(path, weights_only=False)   # for files that you trust",
    ),
    Row(
        "cuda_error",
        "CUDA error|CUBLAS_STATUS|CUDNN_STATUS|device-side assert",
        "A call to CUDA failed; an earlier kernel may be the reason.",
        "awsddp train --env-var CUDA_LAUNCH_BLOCKING=1   # the traceback then names the right line",
    ),
    # A rank that only lost its peers: no cause while another rank has a reason of its own.
    Row(
        "peer_lost",
        r"Connection (reset|closed|refused)|[Cc]onnection was (reset|closed|likely)|Broken pipe"
        r"|remote process exited|ncclRemoteError|Socket closed|recvValue failed|sendBytes failed"
        r"|DistNetworkError|DistStoreError|got 0 bytes|Timed out (waiting|after)|TCPStore|peer has exited",
        "It lost its connection to another rank.",
        "awsddp logs   # the log of the other rank",
        retryable=True,
    ),
    Row(
        "nccl_error",
        "NCCL error|nccl(?:System|UnhandledCuda|Internal|InvalidUsage|InvalidArgument)",
        "NCCL failed.",
        "awsddp train --env-var NCCL_DEBUG=INFO   # NCCL's log then says why",
        retryable=True,
    ),
    Row(
        "loss_not_finite",
        _when(lambda one: one.exit_code > 0 and (one.diverged or re.search(_NOT_FINITE, one.said))),
        "The loss was not a finite number.",
        "use a smaller learning rate, clip the gradients, and check the data",
    ),
    Row(
        "segfault",
        _crashed(signal.SIGSEGV),
        "A library that is not Python crashed{place}.",
        _PACKAGES,
    ),
    Row(
        "illegal_instruction",
        _crashed(signal.SIGILL),
        "A library has instructions that the node's processor lacks{place}.",
        "install a build for this processor, or choose another --instance-type",
    ),
    Row(
        "abort",
        _crashed(signal.SIGABRT),
        "A library aborted{place}: see its message above.",
        "awsddp logs",
    ),
    Row(
        "output_lost",
        _when(lambda one: one.exit_code == 120),
        "Python could not write the last output: stdout was closed, or the disk is full.",
        "awsddp exec df -h   # the disks; and see what the script does with sys.stdout",
    ),
    Row(
        "signal",
        _when(lambda one: one.exit_code < 0),
        "The script, or somebody outside awsddp, sent it.",
    ),
    Row("exit", "", ""),
)
ECHOES = TIMED_OUT | {"abort_at_exit", "master_unreachable", "peer_lost"}
"""Kinds that another rank's fault may have brought about."""

_HANDLED = frozenset({"file_not_found", "import_error", "permission"})
"""Kinds that a program often handles: where another exception follows, they are not why it ended."""


def explain(evidence: Evidence) -> dict[str, Any]:
    """Return why a rank ended: `kind`, `retryable`, `values` of the row's texts, `explanation` and `next`."""
    words, status = _recognized(evidence), evidence.status()
    for earlier in evidence.earlier if words["kind"] == "exit" else ():
        evidence.said = earlier
        found = _recognized(evidence)
        if found["kind"] != "exit" and found["kind"] not in _HANDLED:
            words, status = found, f"{status} It followed: {earlier.rstrip('.')}."
            break
    return {**words, "explanation": f"{status} {words['explanation']}".rstrip()}


def _recognized(evidence: Evidence) -> dict[str, Any]:
    recognized = ((row, _values(row.recognize, evidence)) for row in TABLE)
    row, values = next((row, values) for row, values in recognized if values is not None)
    return {**words_of(row, values), "values": values}


def _values(recognize: str | Recognizer, evidence: Evidence) -> dict[str, str] | None:
    if not isinstance(recognize, str):
        return recognize(evidence)
    found = re.search(recognize, evidence.said)
    return found.groupdict("") if found else None
