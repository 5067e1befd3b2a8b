"""Starting, finding and stopping the local cloud of a home. Light: heavy imports stay with the daemon."""

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
from awsddp.local.machine import Place, run_into, write_json
from awsddp.state import make_folder, take

if TYPE_CHECKING:
    from awsddp.model.documents import LocalDocument

REGION = "us-east-1"
START_S = 60.0
PATIENCE_S = 30.0
"""After how long without an instance and a client an automatic one ends itself."""
VERSION = 8
"""Of what a local cloud keeps and answers: raised when a client or a daemon of before could not read it."""


@dataclass(frozen=True)
class LocalInfo:
    """A local cloud: how to reach it, what it is, who started it."""

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
    """None when its daemon is dead; `start` revives it."""
    node_s3: str | None = None
    """Where its hosts reach S3; None where nothing boots."""


def start(
    home: Path, *, auto: bool = False, mode: str | None = None, share: tuple[Path, ...] = ()
) -> LocalInfo:
    """Make sure that the local cloud of a home runs, and return it; one that died goes on where it was.

    :param auto: nobody asked for it by name, so it ends when nothing lives in it and no client is there.
    :param mode: "loopback" or "records"; None takes the best that this machine can do, or what runs.
    :param share: folders of the machine to show read-only in nodes that boot from now on.
    :raises LocalCloudError: this machine cannot, or the daemon did not come up; `why` says it.
    """
    place = Place(home)
    try:
        with client_lock(place):
            write_json(place.settings, _settings(place, auto=auto, mode=mode, share=share))
            return _running(place)
    except OSError as error:
        raise LocalCloudError(
            f"the local cloud cannot use {place.folder}",
            why=str(error),
            next="free disk space there, or set AWSDDP_HOME to another folder",
        ) from error


def find(home: Path) -> LocalInfo | None:
    """The local cloud of a home, or None if there is none. One that is just starting is waited for.

    One whose daemon died counts if it was started by name or has instances; its `pid` is None.

    :raises LocalCloudError: it was made by another version of awsddp.
    """
    place = Place(home)
    until = time.monotonic() + START_S
    while (alive := _daemon_lives(place)) and "pid" not in read_report(place) and time.monotonic() < until:
        time.sleep(0.02)
    with suppress(FileNotFoundError, KeyError, ValueError):
        info = _info(place, alive=alive)
        if alive or not info.auto or place.living.exists():
            return info
    return None


def stop(home: Path, *, keeps_s3: bool = False) -> bool:
    """Ends the local cloud of a home: instances, processes, mounts, namespaces, interfaces, cgroups, files.

    What is in its S3 is removed, too, unless it `keeps_s3`.

    The image cache stays. Returns false where there was none.

    :raises LocalCloudError: something could not be ended.
    """
    place = Place(home)
    # Processes of its hosts, or a namespace: also where its files were removed.
    remains = bool(
        cgroups.processes(place) or loopback_cleanup.marked(f"{place.tag}-") or network.namespaces(place)
    )
    if not (remains or place.folder.exists() or place.buckets.exists()):
        return False
    with client_lock(place):
        existed = remains or place.settings.exists()
        _end_daemon(place)
        sweep(place)
        if not keeps_s3:
            shutil.rmtree(place.buckets, ignore_errors=True)
    return existed


def sweep(place: Place) -> None:
    """Removes all that a local cloud had, by name alone: it needs neither its daemon nor its state.

    Ends every process of its hosts and removes namespaces, interfaces, cgroups and files.

    :raises LocalCloudError: something is still there.
    """
    from awsddp.local import nspawn

    mark = f"{place.tag}-"
    if not (
        loopback_cleanup.end(mark) and cgroups.end(place)
    ):  # a daemon first, which could boot hosts meanwhile
        raise LocalCloudError(
            "processes of the local cloud do not end",
            why=f"pids {sorted({*cgroups.processes(place), *loopback_cleanup.marked(mark)})[:10]}",
            next="awsddp local stop",
        )
    network.close_network(place)
    for folder in (nspawn.RUNTIME / "propagate").glob(f"{place.machine('')}*"):
        with suppress(OSError):
            folder.rmdir()
    nspawn.forget_locks()
    if place.folder.exists():
        shutil.rmtree(place.folder)


def ask(info: LocalInfo, order: dict[str, Any] | None = None) -> LocalDocument:
    """Return what `awsddp local status` shows, after an order to the daemon.

    :param order: {"add": the fields of a fault} (faults.py), which is in force once this returns, or
        {"clear": its number, None for all}.
    :raises UsageError: no such operation, instance, effect or number.
    :raises LocalCloudError: its daemon does not answer.
    """
    from http.client import HTTPConnection, HTTPException

    from awsddp.model.documents import LocalDocument

    line = HTTPConnection(info.endpoint.removeprefix("http://"), timeout=10)  # never through a proxy
    try:
        secret = {"X-Awsddp-Secret": info.secret_access_key}
        line.request("POST", "/_awsddp/", json.dumps(order) if order else None, secret)
        reply = line.getresponse()
        said = json.loads(reply.read())
        if reply.status == 400:
            refused = said["error"]
            raise UsageError(refused["message"], refused["why"], refused["next"])
        return msgspec.convert({**said, **vars(info)}, LocalDocument)
    except (OSError, HTTPException, ValueError, LookupError, TypeError, msgspec.ValidationError) as error:
        # A daemon that ends may cut its answer; another program may have its port by then.
        raise LocalCloudError(
            f"the local cloud at {info.endpoint} does not answer", why=str(error), next="awsddp local start"
        ) from error
    finally:
        line.close()


def _settings(place: Place, *, auto: bool, mode: str | None, share: tuple[Path, ...]) -> dict[str, Any]:
    """What was asked for so far and now."""
    earlier = _read_settings(place) if place.settings.exists() else {}
    if earlier and mode not in (None, earlier["mode"]):
        flag = "--no-hosts" if mode == "records" else "--loopback"
        raise LocalCloudError(
            f"the local cloud already runs in {earlier['mode']} mode",
            why="its mode cannot change while it exists",
            next=f"awsddp local stop && awsddp local start {flag}",
        )
    if not earlier:
        chosen, why = machine.choose_mode(mode, place.home)
        earlier = {"version": VERSION, "mode": chosen, "why": why, "auto": True, "share": []}
    shared = [*earlier["share"], *(str(folder.resolve()) for folder in share)]
    auto = earlier["auto"] and auto
    return {**earlier, "auto": auto, "share": sorted(set(shared)), "patience_s": PATIENCE_S}


def _read_settings(place: Place) -> dict[str, Any]:
    """Return what was asked for.

    :raises LocalCloudError: the file is torn, or of another version.
    """
    settings: dict[str, Any] = {}
    with suppress(ValueError):
        settings = json.loads(place.settings.read_text())
    if settings.get("version") != VERSION:
        raise LocalCloudError(
            f"the local cloud of {place.home} was made by another version of awsddp",
            why=f"or this file is damaged: {place.settings}",
            next="awsddp local stop   # it ends all its instances; then the command again",
        )
    return settings


def _info(place: Place, *, alive: bool) -> LocalInfo:
    settings, report = _read_settings(place), json.loads(place.report.read_text())
    known = {**settings, **report, "pid": report["pid"] if alive else None}
    return LocalInfo(**{field.name: known[field.name] for field in fields(LocalInfo)})


@contextmanager
def client_lock(place: Place, *, wait: bool = True) -> Iterator[None]:
    """One client at a time; `stop` removes the file, so who waited looks whether it is still the one.

    :raises BlockingIOError: another has it, and `wait` is false.
    """
    while True:
        make_folder(place.folder)
        try:
            lock = place.client_lock.open("w")
        except FileNotFoundError:
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            with suppress(FileNotFoundError):
                if place.client_lock.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                    yield
                    return


def read_report(place: Place) -> dict[str, Any]:
    """Return what the daemon reports of itself; empty where there is none."""
    with suppress(FileNotFoundError):
        report: dict[str, Any] = json.loads(place.report.read_text())
        return report
    return {}


def _daemon_lives(place: Place) -> bool:
    try:
        with place.daemon_lock.open("r+") as lock:
            return not take(lock, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _spawn(place: Place) -> bool:
    """Starts the daemon in a session of its own, its lock handed over; false if one lives after all."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    with place.daemon_lock.open("a") as lock, place.log.open("ab") as log:
        if not take(lock):
            return False
        lock.truncate(0)
        if report := read_report(place):
            write_json(place.report, {key: report[key] for key in report if key not in ("pid", "error")})
        daemon = [sys.executable, "-m", "awsddp.local.daemon", str(place.home.resolve()), str(lock.fileno())]
        # The mark is how it is found once its files are removed.
        marked = {"AWSDDP_HOST": place.daemon_mark}
        environ = {**os.environ, **marked, "PYTHONPATH": path, "PATH": machine.SEARCH}
        run_into(log, "setsid", "--fork", *daemon, env=environ, pass_fds=[lock.fileno()], check=True)
    return True


def _running(place: Place) -> LocalInfo:
    """Waits until the daemon answers; starts it where none lives, also if one is just dying."""
    until = time.monotonic() + START_S
    spawned = False
    while time.monotonic() < until:
        alive = _daemon_lives(place)
        report = read_report(place)
        if alive and "pid" in report:
            with suppress(LocalCloudError):
                ask(info := _info(place, alive=True))
                return info
        if spawned and "error" in report:
            error = report["error"]
            raise LocalCloudError(error["message"], why=error["why"], next=error["next"])
        if spawned and not alive:
            break
        spawned = spawned or (not alive and _spawn(place))
        time.sleep(0.02)
    lines = place.log.read_text(errors="replace").strip().splitlines() if place.log.exists() else []
    raise LocalCloudError(
        "the local cloud did not start",
        why="\n".join(lines[-5:]),
        next=f"read {place.log}, then: awsddp local stop",
    )


def _end_daemon(place: Place) -> None:
    """Kill the daemon: what it has is on the disk, and what it leaves can be swept."""
    until = time.monotonic() + 10
    while _daemon_lives(place):
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            # Its pid is written first of all: one that starts can be ended too.
            os.kill(int(place.daemon_lock.read_text()), signal.SIGKILL)
        if time.monotonic() > until:
            raise LocalCloudError(
                "the local cloud's daemon does not end",
                why=f"its log is {place.log}",
                next="awsddp local stop",
            )
        time.sleep(0.02)
