"""Start this node's part of a job: check the request, create the job's folder, start the agent.

Only one client at a time, on any machine, is allowed to start jobs on a node. The client first claims this
right.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.agent.file_tree import snapshot
from awsddp.agent.job_folder import (
    CommandError,
    JobFolder,
    jobs_folder,
    list_job_folders,
    rank_search_path,
    write_json,
)
from awsddp.agent.messages import NOTHING, Claim, Launch, Response, Slots, Unclaim

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RESERVE_BYTES = 1 << 20
_CLAIM_SECONDS = 10.0
_POLL_SECONDS = 0.05


class LaunchLock:
    """This node's launch lock. The process that holds the lock ends when its client disconnects."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def acquire(self, owner: str, *, wait_s: float, lease_s: int = 0) -> float:
        """Acquire the lock, for at most `lease_s` seconds (0: no limit) in case the client disappears.

        Return how many seconds the lock had been free, or 0.0 if this process already holds the lock. Raises
        CommandError, which names the owner, if the lock is not free within `wait_s`.
        """
        if self._descriptor is not None:
            return 0.0
        path = Path.home() / ".awsddp" / "launch.lock"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(str(path), os.O_CREAT | os.O_RDWR, 0o600)
        end = time.monotonic() + wait_s
        while not _try_lock(descriptor):
            if time.monotonic() > end:
                why = "held by " + os.pread(descriptor, 1000, 0).decode("utf-8", "replace")
                os.close(descriptor)
                raise CommandError("another client is starting a job on this node", why, kind="busy")
            time.sleep(_POLL_SECONDS)
        info = os.fstat(descriptor)
        free_s = time.time() - (info.st_mtime if info.st_size else 0.0)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
        self._descriptor = descriptor
        signal.signal(signal.SIGALRM, lambda *_: self.release())
        signal.alarm(lease_s)
        return free_s

    def release(self) -> None:
        """Release the lock, even if a child process has inherited it."""
        if self._descriptor is not None:
            signal.alarm(0)
            os.utime(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


CLAIM = LaunchLock()


def claim(request: Claim) -> dict[str, float]:
    """Acquire the lock for this client, until the client launches a job or disconnects.

    `free_s` in the response is how many seconds the lock had been free.
    """
    free_s = CLAIM.acquire(request.owner, wait_s=request.wait_s, lease_s=request.lease_s)
    return {"claimed": True, "free_s": free_s}


def unclaim(_: Unclaim) -> dict[str, float]:
    """Release the lock."""
    CLAIM.release()
    return {"claimed": False, "free_s": 0.0}


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def launch(request: Launch) -> dict[str, str]:
    """Start the job's agent on this node, detached.

    The job's folder appears complete or not at all. The launch ends the client's claim on the node. Raises
    CommandError if another job is running, a port is taken, the script is missing, the job already exists, or
    the folder cannot be written.
    """
    CLAIM.acquire(f"the launch of job {request.job}", wait_s=_CLAIM_SECONDS)
    try:
        return _launch(request)
    finally:
        CLAIM.release()


def _launch(request: Launch) -> dict[str, str]:
    folder = JobFolder(request.job)
    if request.folder != str(folder.path):
        raise CommandError(
            f"the home directory has changed since the last check; it is now {Path.home()}", kind="node"
        )
    if folder.path.exists():  # only the process that holds the lock creates folders
        raise CommandError(f"job {folder.job} already exists on this node", kind="taken")
    for job, nodes in blocking_nodes_by_job(request.gpus).items():
        if nodes and job not in request.after:
            raise CommandError(f"job {job} runs on this node", "a node runs one job at a time", kind="busy")
    _check(request)
    listener = _listen(request) if request.node == request.first_node.node else None
    try:
        jobs_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        part = JobFolder(request.job, jobs_folder() / f".new-{os.getpid()}-{folder.job}")
        part.path.mkdir(mode=0o700)
        try:
            lock = _create_folder(part, request)
            part.path.rename(folder.path)
        except BaseException:
            import shutil  # imported late, because the import would cost other requests 5 ms

            shutil.rmtree(str(part.path), ignore_errors=True)
            raise
    except OSError as error:
        raise CommandError(f"cannot write {jobs_folder()}", str(error), kind="node") from error
    _start_agent(request, folder, listener, lock)
    if request.saving:
        _start_detached(request.saving, folder.path / "saver.log")
    if request.notify:
        _start_detached(request.notify, folder.path / "notify.log")
    return {"job": request.job}


def slots(request: Slots) -> Response:
    """Return this node's jobs, and the slots and ports in use on it."""
    used = [folder.request().slot for folder in list_job_folders() if folder.is_agent_running()]
    taken = [port for port in request.ports if not _is_port_free(port)]
    return Response(used=sorted(used), taken=taken, jobs=blocking_nodes_by_job(request.gpus))


def blocking_nodes_by_job(gpus: Sequence[int]) -> dict[str, list[int]]:
    """Return {job: the job's nodes} for all jobs on this node, with [] for a job that does not block `gpus`.

    A job blocks a launch on `gpus` if it has not ended and uses one of `gpus`. An empty `gpus`, in the
    argument or in a job, means all GPUs.
    """
    return {
        folder.job: _blocking_nodes(folder, gpus) if folder.is_active() else []
        for folder in list_job_folders()
    }


def _blocking_nodes(folder: JobFolder, gpus: Sequence[int]) -> list[int]:
    request = folder.request()
    is_disjoint = gpus and request.gpus and not set(gpus) & set(request.gpus)
    return [] if is_disjoint else [node.node for node in request.nodes]


def _check(request: Launch) -> None:
    workdir = Path(request.workdir)
    if not workdir.is_dir():
        raise CommandError(f"{workdir} not found on this node", "the project folder is missing", kind="node")
    for process in request.processes:
        program, script = process.argv[0], process.script
        path = process.environment.get("PATH") or rank_search_path(request.path)
        search_path = [workdir] if "/" in program else path.split(os.pathsep)
        if not any(os.access(str(Path(folder, program)), os.X_OK) for folder in search_path):
            raise CommandError(f"{program} cannot be run on this node", kind="node")
        if script is not None and not (workdir / script).is_file():
            why = f"rank {process.ranks[0]} runs it"
            raise CommandError(f"{script} not found on this node", why, kind="usage")


def _listen(request: Launch) -> socket.socket:
    """Return the listening socket for the other nodes' agents. MASTER_PORT must also be free."""
    port = request.link_port
    if not _is_port_free(request.master_port):
        raise CommandError(f"port {request.master_port} (MASTER_PORT) is taken on this node")
    try:
        return socket.create_server((request.first_node.private_ip, port), backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"port {port} (for the job's agents) is taken on this node") from error
        raise CommandError(f"port {port} cannot be opened on this node", str(error), kind="node") from error


def _is_port_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _create_folder(folder: JobFolder, request: Launch) -> int:
    """Create the job's folder and acquire its lock. Return the lock's descriptor."""
    lock = folder.acquire_lock()
    for path in (folder.logs, folder.run, folder.helper, folder.stacks, folder.path / "errors"):
        path.mkdir(mode=0o700)
    (folder.helper / "sitecustomize.py").write_text(request.helper, encoding="utf-8")
    write_json(folder.path / "job.json", _without_secrets(request))
    if request.saving:
        _prepare_uploader(folder, request)
    for process in request.processes:
        for name, text in process.files.items():
            (folder.path / name).write_text(text, encoding="utf-8")
    folder.reserve.write_bytes(bytes(_RESERVE_BYTES))
    folder.snapshot.write_text(json.dumps(snapshot(Path(request.workdir))), encoding="utf-8")
    return lock


def _prepare_uploader(folder: JobFolder, request: Launch) -> None:
    """Write saver.json and the first saving.json.

    The node's watchdog (templates/user_data.yaml) restarts the uploader with the command in saver.json.
    """
    counts = dict.fromkeys(("files", "bytes", "pending_files", "pending_bytes"), 0)
    write_json(folder.saving, {**counts, "error": "", "ended": False, "at": time.time()})
    write_json(folder.uploader_command, request.saving)
    folder.uploader_lock.touch(mode=0o600)


def _without_secrets(request: Launch) -> Launch:
    """Return the request without the secrets' values, which are never written to disk."""
    written = Launch.from_json(request.to_json())
    written.helper = ""  # the helper is in helper/sitecustomize.py
    written.saving = written.notify = NOTHING
    for process in written.processes:
        variables = process.environment.items()
        process.environment = {name: text for name, text in variables if name not in request.secrets}
    return written


def _start_agent(request: Launch, folder: JobFolder, listener: socket.socket | None, lock: int) -> None:
    """Start the guard and the agent in a new session, and return once the agent runs."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        status = 1
        try:
            os.close(read_end)
            _daemonize(folder.path / "supervisor.log")
            from awsddp.agent.serve import run_guarded

            run_guarded(request, folder, listener, write_end)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    os.close(lock)
    if listener is not None:
        listener.close()
    with os.fdopen(read_end, "rb") as pipe:
        if not pipe.read(1):
            why = (folder.path / "supervisor.log").read_text("utf-8", "replace")
            raise CommandError("the agent did not start", why)


def _start_detached(command: Mapping[str, Any], log_file: Path) -> None:
    """Start a program outside the guard, because the guard kills the job's remaining processes."""
    import subprocess  # imported late, because the import would cost other requests 5 ms

    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command["argv"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(base64.b64decode(command["stdin"]))


def _daemonize(log: Path) -> None:
    """Detach this child process from the terminal, the connection and the current folder."""
    os.setsid()
    os.chdir("/")
    descriptor = os.open(str(log), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(descriptor)
