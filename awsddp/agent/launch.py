"""Starting this node's part of a job: checked, written down, and on its way before the reply.

One client at a time may, on whatever machine it is: it claims the right to.
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
from typing import TYPE_CHECKING

from awsddp.agent.file_tree import snapshot
from awsddp.agent.job_folder import CommandError, JobFolder, folders, jobs_folder, programs, write_json
from awsddp.agent.messages import NOTHING, Claim, Launch, Slots, Told, Unclaim

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESERVE_BYTES = 1 << 20
_CLAIM_SECONDS = 10.0
_POLL_SECONDS = 0.05


class Lock:
    """A lock of this node, held by this process, which lives as long as its client's connection."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, owner: str, *, wait_s: float, lease_s: int = 0) -> float:
        """Wait for the lock and hold it; with `lease_s` no longer than that, as a client can vanish.

        Return how long nobody has held it (s), 0.0 where it is held already. Raises CommandError that names
        the owner after `wait_s`.
        """
        if self._descriptor is not None:
            return 0.0
        path = Path.home() / ".awsddp" / "launch.lock"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(str(path), os.O_CREAT | os.O_RDWR, 0o600)
        end = time.monotonic() + wait_s
        while not _grab(descriptor):
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
        """Give the lock back. A child that has inherited it holds it no longer, either."""
        if self._descriptor is not None:
            signal.alarm(0)
            os.utime(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


CLAIM = Lock()


def claim(request: Claim) -> dict[str, float]:
    """Take the lock for the client at the other end, until it launches or its connection ends.

    `free_s` is how long no other client has held it.
    """
    free_s = CLAIM.take(request.owner, wait_s=request.wait_s, lease_s=request.lease_s)
    return {"claimed": True, "free_s": free_s}


def unclaim(_: Unclaim) -> dict[str, float]:
    """Give the lock back."""
    CLAIM.release()
    return {"claimed": False, "free_s": 0.0}


def _grab(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def launch(request: Launch) -> dict[str, str]:
    """Start the job's supervisor on this node, detached.

    The job's folder appears whole or not at all; the client's claim on the node ends. Raises CommandError:
    another job runs, a port is taken, the script is missing, the job exists already, the folder cannot be
    written.
    """
    CLAIM.take(f"the launch of job {request.job}", wait_s=_CLAIM_SECONDS)
    try:
        return _launch(request)
    finally:
        CLAIM.release()


def _launch(request: Launch) -> dict[str, str]:
    folder = JobFolder(request.job)
    if request.folder != str(folder.path):
        raise CommandError(f"the home of this node is {Path.home()}, not as it was probed", kind="node")
    if folder.path.exists():  # nobody else makes it meanwhile: the lock is held
        raise CommandError(f"job {folder.job} already exists on this node", kind="taken")
    for other, nodes in jobs(request.gpus).items():
        if nodes and other not in request.after:
            raise CommandError(f"job {other} runs on this node", "a node runs one job at a time", kind="busy")
    _check(request)
    listener = _listen(request) if request.node == request.first.node else None
    try:
        jobs_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        part = JobFolder(request.job, jobs_folder() / f".new-{os.getpid()}-{folder.job}")
        part.path.mkdir(mode=0o700)
        try:
            lock = _fill(part, request)
            part.path.rename(folder.path)
        except BaseException:
            import shutil  # here, because it costs every other request 5 ms

            shutil.rmtree(str(part.path), ignore_errors=True)
            raise
    except OSError as error:
        raise CommandError(f"cannot write {jobs_folder()}", str(error), kind="node") from error
    _detach(request, folder, listener, lock)
    if request.saving:
        _save(request, folder)
    return {"job": request.job}


def slots(request: Slots) -> Told:
    """Return what this node's jobs, and others, have taken here."""
    used = [folder.request().slot for folder in folders() if folder.held()]
    taken = [port for port in request.ports if not _is_free(port)]
    return Told(used=sorted(used), taken=taken, jobs=jobs(request.gpus))


def jobs(gpus: Sequence[int]) -> dict[str, list[int]]:
    """Return every job of this node by name, and its nodes where it is in the way, else none.

    In the way is one that has not ended, on a GPU of `gpus`; without `gpus` a job uses all of them.
    """
    return {folder.job: _in_the_way(folder, gpus) if folder.active() else [] for folder in folders()}


def _in_the_way(folder: JobFolder, gpus: Sequence[int]) -> list[int]:
    request = folder.request()
    disjoint = gpus and request.gpus and not set(gpus) & set(request.gpus)
    return [] if disjoint else [one.node for one in request.nodes]


def _check(request: Launch) -> None:
    workdir = Path(request.workdir)
    if not workdir.is_dir():
        raise CommandError(f"{workdir} is not on this node", "the synced folder is missing", kind="node")
    for process in request.processes:
        program, script = process.argv[0], process.script
        path = process.environment.get("PATH") or programs(request.path)
        places = [workdir] if "/" in program else path.split(os.pathsep)
        if not any(os.access(str(Path(place, program)), os.X_OK) for place in places):
            raise CommandError(f"{program} cannot be run on this node", kind="node")
        if script is not None and not (workdir / script).is_file():
            why = f"rank {process.ranks[0]} runs it"
            raise CommandError(f"{script} not found on this node", why, kind="usage")


def _listen(request: Launch) -> socket.socket:
    """Return the socket at which the other supervisors will report; MASTER_PORT must be free, too."""
    port = request.link_port
    if not _is_free(request.master_port):
        raise CommandError(f"port {request.master_port} (MASTER_PORT) is taken on this node")
    try:
        return socket.create_server((request.first.private_ip, port), backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"port {port} (for the job's supervisors) is taken on this node") from error
        raise CommandError(f"port {port} cannot be opened on this node", str(error), kind="node") from error


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _fill(folder: JobFolder, request: Launch) -> int:
    """Make the job's folder and return the descriptor of its lock, which is held."""
    lock = folder.lock()
    for path in (folder.logs, folder.run, folder.helper, folder.stacks, folder.path / "errors"):
        path.mkdir(mode=0o700)
    (folder.helper / "sitecustomize.py").write_text(request.helper, encoding="utf-8")
    write_json(folder.path / "job.json", _without_secrets(request))
    if request.saving:
        _expect_saver(folder, request)
    for process in request.processes:
        for name, text in process.files.items():
            (folder.path / name).write_text(text, encoding="utf-8")
    folder.reserve.write_bytes(bytes(_RESERVE_BYTES))
    folder.snapshot.write_text(json.dumps(snapshot(Path(request.workdir))), encoding="utf-8")
    return lock


def _expect_saver(folder: JobFolder, request: Launch) -> None:
    """Write down that results are saved, and how, before the saver says so itself.

    The node's watchdog starts it again by this where it dies (templates/user_data.yaml).
    """
    nothing = dict.fromkeys(("files", "bytes", "pending_files", "pending_bytes"), 0)
    write_json(folder.saving, {**nothing, "error": "", "ended": False, "at": time.time()})
    write_json(folder.saver, request.saving)
    folder.saver_lock.touch(mode=0o600)


def _without_secrets(request: Launch) -> Launch:
    """Return the request as it may be written: values of secrets stay in the memory of processes."""
    written = Launch.from_json(request.to_json())
    written.helper = ""  # it lies beside
    written.saving = NOTHING
    for process in written.processes:
        variables = process.environment.items()
        process.environment = {name: text for name, text in variables if name not in request.secrets}
    return written


def _detach(request: Launch, folder: JobFolder, listener: socket.socket | None, lock: int) -> None:
    """Leave a guard and its supervisor behind, in a session of their own; return when they are up."""
    up, ready = os.pipe()
    if os.fork() == 0:
        status = 1
        try:
            os.close(up)
            _leave(folder.path / "supervisor.log")
            from awsddp.agent.serve import guard

            guard(request, folder, listener, ready)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(ready)
    os.close(lock)
    if listener is not None:
        listener.close()
    with os.fdopen(up, "rb") as pipe:
        if not pipe.read(1):
            why = (folder.path / "supervisor.log").read_text("utf-8", "replace")
            raise CommandError("the supervisor did not start", why)


def _save(request: Launch, folder: JobFolder) -> None:
    """Start what saves the results, beside the guard, which kills what is left of the job."""
    import subprocess  # here, because it costs every other request 5 ms

    with (folder.path / "saver.log").open("wb") as log:
        process = subprocess.Popen(
            request.saving["argv"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(base64.b64decode(request.saving["stdin"]))


def _leave(log: Path) -> None:
    """In the child: let go of the terminal, the connection and the current folder."""
    os.setsid()
    os.chdir("/")
    descriptor = os.open(str(log), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(descriptor)
