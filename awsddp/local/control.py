"""Start, find and stop the local cloud of an AWSDDP_HOME. Large packages are imported only in the daemon."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from awsddp.errors import LocalCloudError, UsageError
from awsddp.local import cgroups, loopback_cleanup, machine, network
from awsddp.local.machine import CloudPaths, run_to_log, write_json
from awsddp.state import make_folder, try_lock

if TYPE_CHECKING:
    from awsddp.model.documents import LocalDocument

REGION = "us-east-1"
START_S = 60.0
PATIENCE_S = 30.0
"""How long an automatically started local cloud keeps running without instances and clients."""
VERSION = 8
"""The format version of the local cloud's files and responses. Increase this number if a change makes the
files or responses unreadable for earlier clients or daemons."""


@dataclass(frozen=True)
class LocalInfo:
    """Describes a local cloud: how to connect to it, its mode, and whether a command started it
    automatically."""

    endpoint: str
    region: str
    access_key_id: str
    secret_access_key: str
    mode: str
    why: str
    ssh_port: int
    caller_address: str
    auto: bool
    pid: int | None
    """None if the daemon died; `start` restarts the daemon."""
    node_s3: str | None = None
    """The S3 endpoint that the hosts use; None if the instances are only records, without hosts."""


def start(
    home: Path, *, auto: bool = False, mode: str | None = None, share: tuple[Path, ...] = ()
) -> LocalInfo:
    """Start or resume an AWSDDP_HOME's local cloud if it is not running, and return it.

    :param auto: True if a command starts the local cloud automatically, False for the user's `local start`.
        An automatically started local cloud ends once it has no instances or clients.
    :param mode: "loopback" or "records"; None for the existing local cloud's mode or, if there is no local
        cloud, the best mode.
    :param share: the machine's folders to mount read-only in nodes that boot from now on.
    :raises LocalCloudError: this machine cannot run the local cloud, or the daemon did not start; the error's
        `why` has the reason.
    """
    paths = CloudPaths(home)
    try:
        with hold_client_lock(paths):
            write_json(paths.settings, _merge_settings(paths, auto=auto, mode=mode, share=share))
            return _wait_until_running(paths)
    except OSError as error:
        raise LocalCloudError(
            f"the local cloud cannot use {paths.folder}",
            why=str(error),
            next_step="free disk space there, or set AWSDDP_HOME to another folder",
        ) from error


def find_cloud(home: Path) -> LocalInfo | None:
    """Return an AWSDDP_HOME's local cloud, or None if there is none. Wait while it is starting.

    If the daemon died, the returned `pid` is None. A local cloud without a daemon is returned only if `local
    start` started the local cloud, or if the local cloud has instances.

    :raises LocalCloudError: the local cloud was made by another version of awsddp.
    """
    paths = CloudPaths(home)
    deadline = time.monotonic() + START_S
    while (alive := _is_daemon_alive(paths)) and "pid" not in read_report(paths):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    with suppress(FileNotFoundError, KeyError, ValueError):
        info = _read_info(paths, alive=alive)
        if alive or not info.auto or paths.live_mark.exists():
            return info
    return None


def stop(home: Path, *, keep_s3: bool = False) -> bool:
    """Remove an AWSDDP_HOME's local cloud: instances, processes, mounts, networks, cgroups, files.

    The S3 objects are removed unless `keep_s3` is True. The image cache stays. Return False if there was no
    local cloud.

    :raises LocalCloudError: something could not be removed.
    """
    paths = CloudPaths(home)
    # Processes and namespaces may be left even if the files were removed.
    has_remains = bool(
        cgroups.list_processes(paths)
        or loopback_cleanup.find_processes(f"{paths.tag}-")
        or network.list_namespaces(paths)
    )
    if not (has_remains or paths.folder.exists() or paths.buckets.exists()):
        return False
    with hold_client_lock(paths):
        existed = has_remains or paths.settings.exists()
        _end_daemon(paths)
        sweep(paths)
        if not keep_s3:
            shutil.rmtree(paths.buckets, ignore_errors=True)
    return existed


def sweep(paths: CloudPaths) -> None:
    """Remove everything whose name shows that it belongs to a local cloud, without using the daemon or its
    state.

    This kills the hosts' processes, and removes namespaces, interfaces, cgroups and files.

    :raises LocalCloudError: something could not be removed.
    """
    from awsddp.local import nspawn

    mark = f"{paths.tag}-"
    # The daemon ends first, because it could boot more hosts.
    if not (loopback_cleanup.kill_processes(mark) and cgroups.remove(paths)):
        pids = {*cgroups.list_processes(paths), *loopback_cleanup.find_processes(mark)}
        raise LocalCloudError(
            "processes of the local cloud do not end",
            why=f"pids {sorted(pids)[:10]}",
            next_step="awsddp local stop",
        )
    network.close_network(paths)
    for folder in (nspawn.RUNTIME / "propagate").glob(f"{paths.machine_name('')}*"):
        with suppress(OSError):
            folder.rmdir()
    nspawn.remove_stale_locks()
    if paths.folder.exists():
        shutil.rmtree(paths.folder)


def send_command(info: LocalInfo, command: dict[str, Any] | None = None) -> LocalDocument:
    """Send a command, if one is given, to the daemon, and return the local cloud's status.

    :param command: {"add": the fields of a fault (faults.py)} or {"clear": the fault's number, or None for
        all faults}. An added fault is active once this function returns.
    :raises UsageError: there is no such operation, instance, effect or number.
    :raises LocalCloudError: the daemon does not answer.
    """
    from http.client import HTTPConnection, HTTPException

    from awsddp.model.documents import LocalDocument

    connection = HTTPConnection(info.endpoint.removeprefix("http://"), timeout=10)  # this ignores proxies
    try:
        secret = {"X-Awsddp-Secret": info.secret_access_key}
        connection.request("POST", "/_awsddp/", json.dumps(command) if command else None, secret)
        response = connection.getresponse()
        document = json.loads(response.read())
        if response.status == 400:
            error = document["error"]
            raise UsageError(error["message"], error["why"], error["next"])
        return msgspec.convert({**document, **vars(info)}, LocalDocument)
    except (OSError, HTTPException, ValueError, LookupError, TypeError, msgspec.ValidationError) as failure:
        # The daemon may end during its response, and another program may have taken its port by now.
        raise LocalCloudError(
            f"the local cloud at {info.endpoint} does not answer",
            why=str(failure),
            next_step="awsddp local start",
        ) from failure
    finally:
        connection.close()


def _merge_settings(
    paths: CloudPaths, *, auto: bool, mode: str | None, share: tuple[Path, ...]
) -> dict[str, Any]:
    """Return the existing local cloud's settings, with the requested settings added."""
    earlier = _read_settings(paths) if paths.settings.exists() else {}
    if earlier and mode not in (None, earlier["mode"]):
        flag = "--no-hosts" if mode == "records" else "--loopback"
        raise LocalCloudError(
            f"the local cloud already runs in {earlier['mode']} mode",
            why="its mode cannot change while it exists",
            next_step=f"awsddp local stop && awsddp local start {flag}",
        )
    if not earlier:
        chosen, why = machine.choose_mode(mode, paths.home)
        earlier = {"version": VERSION, "mode": chosen, "why": why, "auto": True, "share": []}
    shared = [*earlier["share"], *(str(folder.resolve()) for folder in share)]
    auto = earlier["auto"] and auto
    return {**earlier, "auto": auto, "share": sorted(set(shared)), "patience_s": PATIENCE_S}


def _read_settings(paths: CloudPaths) -> dict[str, Any]:
    """Return the existing local cloud's settings.

    :raises LocalCloudError: the file is damaged, or another version wrote it.
    """
    settings: dict[str, Any] = {}
    with suppress(ValueError):
        settings = json.loads(paths.settings.read_text())
    if settings.get("version") != VERSION:
        raise LocalCloudError(
            f"the local cloud of {paths.home} was made by another version of awsddp",
            why=f"or this file is damaged: {paths.settings}",
            next_step="awsddp local stop   # this ends all of its instances; then repeat the command",
        )
    return settings


def _read_info(paths: CloudPaths, *, alive: bool) -> LocalInfo:
    settings, report = _read_settings(paths), json.loads(paths.report.read_text())
    values = {**settings, **report, "pid": report["pid"] if alive else None}
    return LocalInfo(**{field.name: values[field.name] for field in fields(LocalInfo)})


@contextmanager
def hold_client_lock(paths: CloudPaths, *, wait: bool = True) -> Iterator[None]:
    """Hold the client lock, which only one client at a time can hold.

    Because `stop` removes the lock file, check after the wait that the path still refers to the locked file.

    :raises BlockingIOError: another client holds the lock, and `wait` is False.
    """
    while True:
        make_folder(paths.folder)
        try:
            lock = paths.client_lock.open("w")
        except FileNotFoundError:
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            with suppress(FileNotFoundError):
                if paths.client_lock.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                    yield
                    return


def read_report(paths: CloudPaths) -> dict[str, Any]:
    """Return the report that the daemon wrote, or {} if there is none."""
    with suppress(FileNotFoundError):
        report: dict[str, Any] = json.loads(paths.report.read_text())
        return report
    return {}


def _is_daemon_alive(paths: CloudPaths) -> bool:
    try:
        with paths.daemon_lock.open("r+") as lock:
            return not try_lock(lock, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _spawn(paths: CloudPaths) -> bool:
    """Start the daemon in its own session and pass it the daemon lock; return False if a daemon is alive."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    with paths.daemon_lock.open("a") as lock, paths.log.open("ab") as log:
        if not try_lock(lock):
            return False
        lock.truncate(0)
        if report := read_report(paths):
            write_json(paths.report, {key: report[key] for key in report if key not in ("pid", "error")})
        daemon = [sys.executable, "-m", "awsddp.local.daemon", str(paths.home.resolve()), str(lock.fileno())]
        # The mark identifies the daemon even after its files are removed.
        mark = {"AWSDDP_HOST": paths.daemon_mark}
        environ = {**os.environ, **mark, "PYTHONPATH": path, "PATH": machine.SEARCH}
        run_to_log(log, "setsid", "--fork", *daemon, env=environ, pass_fds=[lock.fileno()], check=True)
    return True


def _wait_until_running(paths: CloudPaths) -> LocalInfo:
    """Wait until the daemon answers; start it if it is not alive or ends during the wait."""
    deadline = time.monotonic() + START_S
    spawned = False
    while time.monotonic() < deadline:
        alive = _is_daemon_alive(paths)
        report = read_report(paths)
        if alive and "pid" in report:
            with suppress(LocalCloudError):
                send_command(info := _read_info(paths, alive=True))
                return info
        if spawned and "error" in report:
            error = report["error"]
            raise LocalCloudError(error["message"], why=error["why"], next_step=error["next"])
        if spawned and not alive:
            break
        spawned = spawned or (not alive and _spawn(paths))
        time.sleep(0.02)
    lines = paths.log.read_text(errors="replace").strip().splitlines() if paths.log.exists() else []
    raise LocalCloudError(
        "the local cloud did not start",
        why="\n".join(lines[-5:]),
        next_step=f"read {paths.log}, then: awsddp local stop",
    )


def _end_daemon(paths: CloudPaths) -> None:
    """Kill the daemon, whose state is on the disk; `sweep` removes its hosts."""
    deadline = time.monotonic() + 10
    while _is_daemon_alive(paths):
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            # A daemon first writes its pid, so that it can be killed even while it starts.
            os.kill(int(paths.daemon_lock.read_text()), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LocalCloudError(
                "the local cloud's daemon does not end",
                why=f"its log is {paths.log}",
                next_step="awsddp local stop",
            )
        time.sleep(0.02)
