"""Starting, finding and stopping the local cloud of a home. Light: heavy imports stay with the daemon."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from awsddp.errors import LocalCloudError, UsageError
from awsddp.local.place import Place
from awsddp.private import make_folder

REGION = "us-east-1"
START_S = 60.0
PATIENCE_S = 30.0
VERSION = 3
"""Of what a local cloud keeps and answers: raised when a client or a daemon of before could not read it."""
KEPT = ("port", "block", "ssh_port", "access_key_id", "secret_access_key")


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


def start(
    home: Path,
    *,
    auto: bool = False,
    mode: str | None = None,
    share: tuple[Path, ...] = (),
    patience_s: float = PATIENCE_S,
    on_event: Callable[[str], None] = lambda _: None,
) -> LocalInfo:
    """Makes sure that the local cloud of a home runs, and returns it; one that died goes on where it was.

    :param auto: nobody asked for it by name, so it ends when nothing lives in it and no client is there.
    :param patience_s: after how long without both an automatic one ends itself.
    :param mode: "nspawn", "loopback" or "records"; None takes what this machine can do, or what runs.
    :param share: folders of the machine to show read-only in nodes that boot from now on.
    :param on_event: told what takes long.
    :raises LocalCloudError: this machine cannot, or the daemon did not come up; `why` says it.
    """
    place = Place(home)
    try:
        return _started(place, auto=auto, mode=mode, share=share, patience_s=patience_s, on_event=on_event)
    except OSError as error:
        raise LocalCloudError(
            f"the local cloud cannot use {place.folder}",
            why=str(error),
            next="free disk space there, or set AWSDDP_HOME to another folder",
        ) from error


def _started(
    place: Place,
    *,
    auto: bool,
    mode: str | None,
    share: tuple[Path, ...],
    patience_s: float,
    on_event: Callable[[str], None],
) -> LocalInfo:
    with client_lock(place):
        settings = _settings(place, auto=auto, mode=mode, share=share) | {"patience_s": patience_s}
        if settings["mode"] != "records":
            from awsddp.local import torchenv

            bound = settings["mode"] == "nspawn"
            cache = torchenv.cache_folder()
            settings["torch"] = str(torchenv.ensure(cache, interpreter=bound, on_event=on_event))
        write_json(place.settings, settings)
        return _running(place)


def find(home: Path) -> LocalInfo | None:
    """The local cloud of a home, or None if there is none. One that is just starting is waited for.

    One whose daemon died counts if it was started by name or has instances; its `pid` is None.

    :raises LocalCloudError: it was made by another version of awsddp.
    """
    place = Place(home)
    until = time.monotonic() + START_S
    while (alive := _daemon_lives(place)) and "pid" not in _report(place) and time.monotonic() < until:
        time.sleep(0.02)
    with suppress(FileNotFoundError, KeyError, ValueError):
        info = _info(place, alive=alive)
        if alive or not info.auto or place.living.exists():
            return info
    return None


def stop(home: Path) -> bool:
    """Ends the local cloud of a home: instances, processes, mounts, namespaces, interfaces, cgroups, files.

    The image cache stays. Returns false where there was none.

    :raises LocalCloudError: something could not be ended.
    """
    from awsddp.local import sweep

    place = Place(home)
    runs = sweep.runs(place)  # also where its files were removed
    if not (runs or place.folder.exists()):
        return False
    with client_lock(place):
        existed = runs or place.settings.exists()
        _end_daemon(place)
        sweep.sweep(place)
    return existed


def status(info: LocalInfo) -> dict[str, Any]:
    """The document of `awsddp local status`.

    :raises LocalCloudError: its daemon does not answer.
    """
    said = _ask(info)
    return {
        "endpoint": info.endpoint,
        "region": info.region,
        "access_key_id": info.access_key_id,
        "secret_access_key": info.secret_access_key,
        "mode": info.mode,
        "why": info.why,
        "instances": said["instances"],
        "faults": said["faults"],
    }


def fault_add(
    info: LocalInfo,
    operation: str,
    effect: str,
    **choices: Any,
) -> list[dict[str, Any]]:
    """Makes calls of `operation` go wrong (faults.py), or the node of that id (node_faults.py); returns all
    in force, once they are.

    :param choices: `for_s`: heals by itself after so long; `notice_s` of a node's "reclaim". Of calls:
        `times`, how often, else until it is cleared; `seconds`; `only`: strikes requests with a parameter of
        this value (a launch has its zone).
    :raises UsageError: no such operation, instance or effect.
    :raises LocalCloudError: its daemon does not answer.
    """
    fields = {"operation": operation, "effect": effect, **choices}
    found: list[dict[str, Any]] = _ask(info, {"add": fields})["faults"]
    return found


def fault_clear(info: LocalInfo, number: int | None = None) -> list[dict[str, Any]]:
    """Takes one fault away, or all; returns those that stay.

    :raises UsageError: there is none of that number.
    :raises LocalCloudError: its daemon does not answer.
    """
    found: list[dict[str, Any]] = _ask(info, {"clear": number})["faults"]
    return found


def _ask(info: LocalInfo, asked: dict[str, Any] | None = None) -> dict[str, Any]:
    import urllib.error
    import urllib.request
    from http.client import HTTPException

    request = urllib.request.Request(
        f"{info.endpoint}/_awsddp/",
        data=json.dumps(asked).encode() if asked else None,
        headers={"X-Awsddp-Secret": info.secret_access_key, "Content-Type": "application/json"},
    )
    try:
        # Never through a proxy: the endpoint is on this machine.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=10) as reply:
                said: dict[str, Any] = json.load(reply)
                return said
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            refused = json.load(error)["error"]
            refusal = UsageError(refused["message"], refused["why"], refused["next"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        # A daemon that ends may cut its answer; another program may have its port by then.
        raise LocalCloudError(
            f"the local cloud at {info.endpoint} does not answer", why=str(error), next="awsddp local start"
        ) from error
    raise refusal


def write_json(path: Path, document: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Writes a file whole or not at all, readable by its owner alone."""
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(json.dumps(document, indent=1))
    new.rename(path)


def _settings(place: Place, *, auto: bool, mode: str | None, share: tuple[Path, ...]) -> dict[str, Any]:
    """What was asked for so far and now."""
    earlier = _read_settings(place) if place.settings.exists() else {}
    if earlier and mode not in (None, earlier["mode"]):
        flag = {"records": " --no-hosts", "loopback": " --loopback"}.get(str(mode), "")
        raise LocalCloudError(
            f"the local cloud already runs in {earlier['mode']} mode",
            why="its mode cannot change while it exists",
            next=f"awsddp local stop && awsddp local start{flag}",
        )
    for folder in share:
        if not folder.is_dir():
            raise LocalCloudError(f"cannot share {folder}", why="it is not a folder", next="name a folder")
    if not earlier:
        from awsddp.local import requirements

        chosen, why = requirements.choose(mode, place.home)
        earlier = {"version": VERSION, "mode": chosen, "why": why, "auto": True, "share": []}
    shared = [*earlier["share"], *(str(folder.resolve()) for folder in share)]
    return {**earlier, "auto": earlier["auto"] and auto, "share": sorted(set(shared))}


def _read_settings(place: Place) -> dict[str, Any]:
    """What was asked for.

    :raises LocalCloudError: the file is torn, or of another version.
    """
    try:
        settings: dict[str, Any] = json.loads(place.settings.read_text())
        version = settings.get("version", 1)
    except (ValueError, AttributeError) as error:
        raise LocalCloudError(
            f"cannot read {place.settings}",
            why=str(error),
            next="awsddp local stop   # it ends all instances",
        ) from error
    if version != VERSION:
        age = "an older" if version < VERSION else "a newer"
        raise LocalCloudError(
            f"the local cloud of {place.home} was made by {age} awsddp",
            why="what it keeps and answers is of another form",
            next="awsddp local stop   # it ends all its instances; then the command again",
        )
    return settings


def _info(place: Place, *, alive: bool) -> LocalInfo:
    settings, report = _read_settings(place), json.loads(place.report.read_text())
    return LocalInfo(
        endpoint=f"http://127.0.0.1:{report['port']}",
        region=REGION,
        access_key_id=report["access_key_id"],
        secret_access_key=report["secret_access_key"],
        mode=settings["mode"],
        why=settings["why"],
        ssh_port=report["ssh_port"],
        caller_address=str(IPv4Network(report["block"])[1]),
        auto=settings["auto"],
        pid=report["pid"] if alive else None,
    )


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


def _report(place: Place) -> dict[str, Any]:
    with suppress(FileNotFoundError):
        report: dict[str, Any] = json.loads(place.report.read_text())
        return report
    return {}


def _daemon_lives(place: Place) -> bool:
    try:
        with place.daemon_lock.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def _spawn(place: Place) -> bool:
    """Starts the daemon in a session of its own, its lock handed over; false if one lives after all."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    with place.daemon_lock.open("a") as lock, place.log.open("ab") as log:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        lock.truncate(0)
        if report := _report(place):
            write_json(place.report, {key: report[key] for key in KEPT if key in report})
        daemon = [sys.executable, "-m", "awsddp.local.daemon", str(place.home.resolve()), str(lock.fileno())]
        subprocess.run(
            ["setsid", "--fork", *daemon],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path, "PATH": search},
            pass_fds=[lock.fileno()],
            check=True,
        )
    return True


def _running(place: Place) -> LocalInfo:
    """Waits until the daemon answers; starts it where none lives, also if one is just dying."""
    until = time.monotonic() + START_S
    spawned = False
    while time.monotonic() < until:
        alive = _daemon_lives(place)
        report = _report(place)
        if alive and "pid" in report and _answers(info := _info(place, alive=True)):
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


def _answers(info: LocalInfo) -> bool:
    try:
        _ask(info)
    except LocalCloudError:
        return False
    return True


def _end_daemon(place: Place) -> None:
    until = time.monotonic() + 10
    sent: set[int] = set()
    while _daemon_lives(place):
        kill = signal.SIGTERM if time.monotonic() < until - 5 else signal.SIGKILL
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            pid = int(place.daemon_lock.read_text())  # written first of all: one that starts can be ended too
            if kill not in sent:
                os.kill(pid, kill)
                sent.add(kill)
        if time.monotonic() > until:
            raise LocalCloudError(
                "the local cloud's daemon does not end",
                why=f"its log is {place.log}",
                next="awsddp local stop",
            )
        time.sleep(0.02)
