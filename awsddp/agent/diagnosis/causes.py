"""Explain why a rank ended, with a table of causes and the conditions that select a row."""

from __future__ import annotations

import math
import re
import signal
from typing import TYPE_CHECKING

from awsddp.agent.diagnosis.evidence import find_exceptions, last_lines
from awsddp.agent.diagnosis.job_causes import TIMED_OUT, Cause, cause_of, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from awsddp.agent.diagnosis.job_causes import Row

# The first row whose conditions all hold gives the cause of a rank's end. These conditions have a value:
# - `said`: a pattern that matches the rank's last exception, or else the last lines of the rank's log.
# - `log`: a pattern that matches the part of the rank's log that was read, which is the log's end.
# - `kernel`: a pattern that matches the kernel's log, if the rank used a GPU or was ended by a signal.
# - `network`: a pattern that matches the kernel's log, if the rank lost or waited for another rank.
# - `signal`: the signal that ended the rank without an exception.
# - `code`: the rank's exit code.
# All other names in CONDITIONS are conditions without a value.
TABLE = rows(r"""
host_oom: The node ran out of memory, and its kernel killed {victim}.
  killed_for_memory
  next use a smaller batch or fewer loader workers, or a larger --instance-type
killed: Killed from outside awsddp (by a user or a memory limit).
  killed
import_error: {module} is not installed for the python that runs the ranks.
  said (?:NotFoundError|python[\d.]*): No module named '?(?P<module>[\w.]+)
  next awsddp train --env requirements.txt   # if requirements.txt names the module's package
no_metadata: {package} is not installed for the python that runs the ranks: it has no metadata there.
  said (?:metadata was found for|PackageNotFoundError:(?! No )|NotFound: The) '?(?P<package>[\w.-]*\w)
  next awsddp train --env requirements.txt   # if requirements.txt names it; `-e .` is the project itself
file_not_found: The node does not have this file.
  said ^FileNotFoundError:
  next awsddp sync -v   # what is sent, and what stays here
cuda_oom: The GPU ran out of memory.
  said CUDA out of memory|CUDA error: out of memory|Cuda failure 2 'out of memory'
  said CU(BLAS|DNN)_STATUS_ALLOC_FAILED
  next use a smaller batch
ecc_error (retryable): The GPU's memory has a fault.
  said uncorrectable ECC error
  next awsddp recover   # on a new node, from the job's newest checkpoint
# Xids that name the hardware; most others are the program's own. https://docs.nvidia.com/deploy/xid-errors/
ecc_error (retryable): The memory of GPU {gpu} has a fault (Xid {xid} in the kernel's log).
  kernel NVRM: Xid \(PCI:(?P<gpu>[\w:.]+)\): (?P<xid>48|63|64|94|95)\b
  next awsddp recover   # on a new node, from the job's newest checkpoint
xid (retryable): GPU {gpu} failed (Xid {xid} in the kernel's log: {text}).
  kernel NVRM: Xid \(PCI:(?P<gpu>[\w:.]+)\): (?P<xid>62|74|79|119|120|140)\b,? ?(?P<text>[^\n]*)
  next awsddp recover   # on a new node, from the job's newest checkpoint
# Messages of the kernel, and of EC2's network driver if its device no longer reports that it is alive:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/troubleshooting-ena.html
network_failed (retryable): The network device of the node failed ("{text}" in the kernel's log).
  network (?P<text>NETDEV WATCHDOG: \S+|Keep alive watchdog timeout)
  next awsddp recover   # on a new node, from the job's newest checkpoint
abort_at_exit (retryable): The rank aborted at its exit, after its work was done. gloo sometimes causes this.
  signal SIGABRT
  log destroy_process_group|terminate called without an active exception
  next call torch.distributed.barrier() before destroy_process_group()
driver_too_old: The node's NVIDIA driver does not fit this torch.
  said driver on your system is too old|driver version is insufficient|Driver/library version mismatch
  next awsddp plan   # names the driver and the torch that fit; or omit torch from the requirements
gpu_too_new: This torch was not built for the node's GPU.
  said no kernel image is available
  next install a newer torch, or choose another --instance-type
no_such_gpu: The script used a GPU that the node does not have.
  said invalid device ordinal
  next use the GPU of LOCAL_RANK, or fewer ranks: --nproc-per-node
same_gpu: The ranks use the same GPU: {ranks}.
  said Duplicate GPU detected : (?P<ranks>rank \d+ and rank \d+)
  next torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), before the first use of a GPU
no_gpu: The script needs a GPU, and this node or its torch has none.
  said Torch not compiled with CUDA|NCCL support is not compiled|doesn't have NCCL built in
  said Found no NVIDIA driver|No CUDA GPUs are available|no GPUs found
  next choose an --instance-type with GPUs, or the backend: nccl if torch.cuda.is_available() else gloo
no_such_interface: The node has no network interface {name} (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).
  said Unable to find address for: (?P<name>\S+)|no socket interface found
  next remove these variables from the script and from [env]: awsddp sets the right ones on every node
versions_differ: The nodes have different versions of NCCL: {versions}.
  said Mismatched NCCL version detected : (?P<versions>[^\n]+)
  next awsddp train --env requirements.txt   # versions that belong together, on every node
nccl_timeout (retryable): {operation} did not end within NCCL's timeout: another rank did not take part.
  said Watchdog caught collective operation timeout: .*OpType=(?P<operation>\w+)
  next awsddp logs   # shows what the other ranks did; while a job hangs, run: awsddp why
gloo_timeout (retryable): Another rank did not take part in the collective within the timeout.
  said Timed out waiting \d+ms for (?:send|recv) operation|monitoredBarrier
  next awsddp logs   # shows what the other ranks did; while a job hangs, run: awsddp why
rendezvous_timeout (retryable): Only {joined} of {all} ranks joined the process group in time.
  said (?P<joined>\d+)/(?P<all>\d+) clients joined
  next awsddp logs   # shows what the other ranks did; while a job hangs, run: awsddp why
master_unreachable: Nothing answers at {place}, where rank 0 was expected.
  said client socket has (?:timed out|failed).*? connect to [^(]*\((?P<place>[^)]+)\)
  next use MASTER_ADDR and MASTER_PORT, or {{master_addr}} and {{master_port}} in the script's arguments
collective_mismatch: The ranks called different collectives, or the same collective with different sizes.
  said Detected mismatch between collectives|Received data size doesn't match|preamble.length <=
  next awsddp train --env-var TORCH_DISTRIBUTED_DEBUG=DETAIL   # names the collective
model_differs: The ranks built different models.
  said DDP expects same model across all ranks|appears not to match
  next build the model from the same settings and the same seed on every rank
unused_parameters: Some parameters did not contribute to the loss.
  said Expected to have finished reduction in the prior iteration
  next DistributedDataParallel(model, find_unused_parameters=True), or remove them
shm_full: /dev/shm is full.
  log insufficient shared memory|out of shared memory|unable to allocate shared
  next use fewer loader workers
bus_error: Mapped memory is not accessible{place}: /dev/shm or a disk is full, or a mapped file was truncated.
  signal SIGBUS
  next use fewer loader workers; replace a data file with os.replace() instead of writing into it
loader_died: A loader worker of the rank died.
  said DataLoader worker \(pid
  next use fewer loader workers, because each takes memory; num_workers=0 shows an error as an exception
port_in_use (retryable): A port that the script opens is in use on this node.
  said [Aa]ddress already in use|EADDRINUSE
  next awsddp exec 'ss -tlnp'   # shows which process has the port; {{master_port}} is free for the script
disk_full: The node's disk is full.
  said No space left on device|Disk quota exceeded
  next awsddp down && awsddp up --disk GB   # a larger disk
host_oom: The node ran out of memory.
  said Cannot allocate memory|DefaultCPUAllocator: can't allocate|^MemoryError|std::bad_alloc
  said Unable to allocate .* for an array
  next use a smaller batch or fewer loader workers, or a larger --instance-type
too_many_files: The rank has too many open files.
  said Too many open files
  next use fewer loader workers, or: torch.multiprocessing.set_sharing_strategy('file_system')
too_many_processes: The node's limit of processes and threads is reached.
  said can't start new thread|Resource temporarily unavailable
  next use fewer loader workers and threads (OMP_NUM_THREADS)
permission: The user that runs the ranks is not allowed to do this.
  said ^PermissionError|Permission denied|Read-only file system
  next write to $AWSDDP_RUN_DIR or the project folder
no_internet (retryable): The node could not reach a host on the internet.
  said name resolution|Name or service not known|urlopen error|Max retries exceeded
  next awsddp exec -- curl -sSI https://pypi.org   # from each node; or sync the data with the folder
packages_mismatch: Two packages of the node's environment do not fit each other.
  said torchvision::nms does not exist|undefined symbol|may indicate binary incompat|cannot import name
  said version `\S+' not found|Couldn't load custom C\+\+ ops
  next awsddp train --env requirements.txt   # versions that belong together, on every node
library_missing: The node does not have the library {library}.
  said (?P<library>\S+): cannot open shared object file
  next env.setup in awsddp.toml   # a command that installs it on every node
file_not_found: The node does not have this file.
  said (?m)^\S*(?:Error|Exception)\b.*(?:No such file or directory|Dataset not found)
  next awsddp sync -v   # what is sent, and what stays here
syntax_error: The file is not valid for the node's Python.
  said ^(?:Syntax|Indentation|Tab)Error
  next awsddp exec -- python3 --version   # the node's Python may be older than yours
no_such_script: Python did not find {file}: the path is relative to the rank's first folder.
  said can't open file '(?P<file>[^'\n]+)': \[Errno 2\]
  next start it by os.path.abspath(sys.argv[0]), computed before the folder changes (hydra.job.chdir)
usage: The script refused its arguments.
  code 2
  said (?m)^\S+: error:
  next awsddp train SCRIPT -- ARGUMENTS   # the script's arguments follow --; LOCAL_RANK is a variable
no_terminal: The script waits for input from a keyboard, and a rank has no keyboard.
  said ^bdb.BdbQuit|^EOFError: EOF when reading a line
  next remove breakpoint() and input()
no_credentials: The rank has no login for this service.
  said api_key not configured|Unable to locate credentials|NoCredentialsError|GatedRepoError
  said 401 Client Error|No API key
  next awsddp train --env-var NAME   # a secret (WANDB_API_KEY, HF_TOKEN, ...) that is set on this machine
not_started: {why}.
  said awsddp could not start this (?:process|rank): (?P<why>[^\n]+)
checkpoint_differs: The checkpoint was saved from another model.
  said Error\(s\) in loading state_dict
  next use the model settings of the job that saved the checkpoint, or start without --resume
checkpoint_corrupt: The file is not a checkpoint, or is incomplete.
  no_whole_checkpoint
  next awsddp train --resume JOB   # a job with a whole checkpoint; save under another name, then os.replace()
checkpoint_refused: torch.load refused objects in the file that are not tensors.
  said Weights only load failed
  next torch.load(path, weights_only=False)   # for files that you trust
cuda_error: A call to CUDA failed; an earlier kernel may be the reason.
  said CUDA error|CUBLAS_STATUS|CUDNN_STATUS|device-side assert
  next awsddp train --env-var CUDA_LAUNCH_BLOCKING=1   # the traceback then names the right line
# This rank only lost its peers: it is not the cause of the job's end if another rank failed by its own fault.
peer_lost (retryable): It lost its connection to another rank.
  said Connection (reset|closed|refused)|[Cc]onnection was (reset|closed|likely)|Broken pipe
  said remote process exited|ncclRemoteError|Socket closed|recvValue failed|sendBytes failed
  said DistNetworkError|DistStoreError|got 0 bytes|Timed out (waiting|after)|TCPStore|peer has exited
  next awsddp logs   # the log of the other rank
nccl_error (retryable): NCCL failed.
  said NCCL error|nccl(?:System|UnhandledCuda|Internal|InvalidUsage|InvalidArgument)
  next awsddp train --env-var NCCL_DEBUG=INFO   # NCCL's log then says why
loss_not_finite: The loss was not a finite number.
  not_finite
  next use a smaller learning rate, clip the gradients, and check the data
segfault: A native library crashed{place}.
  signal SIGSEGV
  next awsddp train --env requirements.txt   # versions that belong together, on every node
illegal_instruction: A library has instructions that the node's processor lacks{place}.
  signal SIGILL
  next install a build for this processor, or choose another --instance-type
abort: A library aborted{place}: see its message above.
  signal SIGABRT
  next awsddp logs
line_ends: A file has Windows line endings, so its first line names the program "{name}\r".
  log (?:env: .|/)(?P<name>[\w.+-]+)(?:\\r|\r|\^M)(?:.: No such file|: bad interpreter)
  next sed -i 's/\r$//' FILE   # here; in git: a line "* text eol=lf" in .gitattributes
output_lost: Python could not write the last output: stdout was closed, or the disk is full.
  code 120
  next awsddp exec df -h   # shows the free disk space; also check what the script does with sys.stdout
signal: The script, or a program or user outside awsddp, sent the signal.
  signalled
exit:""")
ECHOES = TIMED_OUT | {"abort_at_exit", "master_unreachable", "nccl_error", "peer_lost"}
"""The kinds of causes that may be the result of another rank's fault."""

_HANDLED = frozenset({"file_not_found", "import_error", "no_metadata", "permission"})
"""Kinds of exceptions that programs often handle. An earlier exception of these kinds is not the cause."""
_MORE_LINES = 8  # the errors that NCCL and torch.load raise continue after the exception's line
_PLACE = re.compile(r'^Current thread .*\n +File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_OOM = re.compile(r"Killed process (\d+) \(([^)]*)\).*?anon-rss:(\d+)kB")
_NOT_FINITE = r"(?i)\bloss\b.*\b(nan|inf)\b|\bnan\b.*\bloss\b|returned nan values"
_BAD_CHECKPOINT = (
    "PytorchStreamReader failed|invalid magic number|^EOFError: Ran out of input|unexpected EOF, expected"
    "|Unsupported operand|invalid load key|pickle data was truncated|File is not a zip file"
    "|deserializing header"
)


class Evidence:
    """The evidence for why a rank ended.

    `exit_code` is -N for signal N, `text` is the end of the rank's log, and `loss` is the last loss in the
    rank's metrics. `oom_kills` counts the processes that the kernel killed for lack of memory while the job
    ran; `kernel` returns the kernel's log since the job started.
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
        chain = find_exceptions(text)
        self.exception = chain[0] if chain else None
        self.earlier_exceptions = chain[1:]
        self.signal = -exit_code if exit_code < 0 else max(0, exit_code - 128)
        self.is_killed = self.signal == signal.SIGKILL
        self.has_diverged = isinstance(loss, float) and not math.isfinite(loss)
        self.error_text = self._extract_error_text()

    def _extract_error_text(self) -> str:
        """Return the rank's last exception, or the end of the rank's log if there is no exception."""
        if self.exception and (
            self.exception.endswith(":") or re.search("NCCL|Weights only", self.exception)
        ):
            return "\n".join(
                (self.exception + self.text.rpartition(self.exception)[2]).split("\n")[:_MORE_LINES]
            )
        _, aborted, after = self.text.rpartition("terminate called")
        return self.exception or (aborted + after if aborted else "\n".join(last_lines(self.text)))

    def status(self) -> str:
        """Return a sentence on how the rank ended."""
        if self.exception and self.exit_code in (1, -6):  # Python exits with 1; torch may abort afterwards
            return self.exception if self.exception.endswith(".") else f"{self.exception.rstrip(':')}."
        if self.exit_code >= 0:
            return f"It ended with exit code {self.exit_code}."
        try:
            return f"It was ended by {signal.Signals(-self.exit_code).name}."
        except ValueError:
            return f"It was ended by signal {-self.exit_code}."


def explain(evidence: Evidence) -> Cause:
    """Return the cause of a rank's end."""
    cause, status = _match_row(evidence), evidence.status()
    for earlier in evidence.earlier_exceptions if cause.kind == "exit" else ():
        evidence.error_text = earlier
        earlier_cause = _match_row(evidence)
        if earlier_cause.kind != "exit" and earlier_cause.kind not in _HANDLED:
            cause, status = earlier_cause, f"{status} An earlier exception was: {earlier.rstrip('.')}."
            break
    return cause._replace(explanation=f"{status} {cause.explanation}".rstrip())


def _match_row(evidence: Evidence) -> Cause:
    matches = ((row, _match_conditions(row, evidence)) for row in TABLE)
    return next(cause_of(row, values) for row, values in matches if values is not None)


def _match_conditions(row: Row, evidence: Evidence) -> dict[str, str] | None:
    """Return the values to insert into a row's texts, or None if a condition of the row does not hold."""
    values: dict[str, str] = {}
    for condition, text in row.conditions.items():
        matched = CONDITIONS[condition](evidence, text)
        if matched is None:
            return None
        values.update(matched)
    return values


def _search(pattern: str, text: str) -> dict[str, str] | None:
    match = re.search(pattern, text)
    return match.groupdict("") if match else None


def _kernel(evidence: Evidence, pattern: str) -> dict[str, str] | None:
    """Match if the rank used a GPU or was ended by a signal, and `pattern` matches the kernel's log."""
    is_relevant = evidence.signal or re.search("CUDA|NCCL|cuda", evidence.error_text)
    return _search(pattern, evidence.kernel()) if is_relevant else None


def _network(evidence: Evidence, pattern: str) -> dict[str, str] | None:
    """Match if `pattern` matches the kernel's log, and SIGTERM ended the rank, or it lost another rank, or
    waited for one."""
    is_stopped = evidence.signal == signal.SIGTERM and not evidence.exception
    echoes = [row.conditions["said"] for row in TABLE if row.kind in ECHOES and "said" in row.conditions]
    is_echo = any(_search(echo, evidence.error_text) is not None for echo in echoes)
    return _search(pattern, evidence.kernel()) if is_stopped or is_echo else None


def _signal(evidence: Evidence, name: str) -> dict[str, str] | None:
    """Match if signal `name` ended the rank without an exception; `place` is the rank's last line of code."""
    if evidence.signal != signal.Signals[name] or evidence.exception:
        return None
    frames = _PLACE.findall(evidence.text)
    return {"place": " at {}:{} in {}".format(*frames[-1]) if frames else ""}


def _killed_for_memory(evidence: Evidence, _: str) -> dict[str, str] | None:
    """Match if the kernel killed the rank, or one of its loader workers, because memory ran out."""
    killed_worker = re.search(r"DataLoader worker \(pid.*signal: Killed", evidence.text)
    if not (evidence.oom_kills and (evidence.is_killed or killed_worker)):
        return None
    kills = _OOM.findall(evidence.kernel())
    if not kills:
        return {"victim": "the rank"}
    pid, name, kilobytes = kills[-1]
    return {"victim": f"process {pid} ({name}), which used {int(kilobytes) * 1024 / 1e9:.3g} GB"}


def _no_whole_checkpoint(evidence: Evidence) -> bool:
    """Return True if the rank read a truncated checkpoint, or a file that is not a checkpoint."""
    in_torch = "torch/serialization.py" in evidence.text and r"|^EOFError$|^OSError: \[Errno 22\]"
    return bool(re.search(f"{_BAD_CHECKPOINT}{in_torch or ''}", evidence.error_text))


def _not_finite(evidence: Evidence) -> bool:
    return evidence.exit_code > 0 and (
        evidence.has_diverged or bool(re.search(_NOT_FINITE, evidence.error_text))
    )


CONDITIONS: dict[str, Callable[[Evidence, str], dict[str, str] | None]] = {
    "said": lambda evidence, pattern: _search(pattern, evidence.error_text),
    "log": lambda evidence, pattern: _search(pattern, evidence.text),
    "kernel": _kernel,
    "network": _network,
    "signal": _signal,
    "code": lambda evidence, code: {} if evidence.exit_code == int(code) else None,
    "killed": lambda evidence, _: {} if evidence.is_killed else None,
    "killed_for_memory": _killed_for_memory,
    "no_whole_checkpoint": lambda evidence, _: {} if _no_whole_checkpoint(evidence) else None,
    "not_finite": lambda evidence, _: {} if _not_finite(evidence) else None,
    "signalled": lambda evidence, _: {} if evidence.exit_code < 0 else None,
}
