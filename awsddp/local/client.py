"""What the rest of awsddp knows of the local cloud: start it, ask it, end it, be its client for a command."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from awsddp.errors import ConfigError, LocalCloudError, NotFoundError, UsageError
from awsddp.local import cgroups, control, image
from awsddp.model.events import Event, OnEvent
from awsddp.model.records import Target
from awsddp.state import Folder, make_folder, open_to_append, take
from awsddp.util.format import size_text

if TYPE_CHECKING:
    from awsddp.model.documents import Fault, LocalDocument

RANK_BYTES = 400_000_000
"""What a rank takes that has imported torch and trains a small model."""


def home(awsddp_home: Path, remembered: str | None = None) -> Path:
    """Return the home whose daemon `--local` means: $AWSDDP_LOCAL, else our own.

    A cluster's is the one that its record remembers, for as long as there is a local cloud.
    """
    if remembered is not None and control.find(Path(remembered)) is not None:
        return Path(remembered)
    return Path(os.environ.get("AWSDDP_LOCAL") or awsddp_home).absolute()


def check_region(region: str | None) -> None:
    """Raise ConfigError where this is not the region of the local cloud."""
    if region != control.REGION:
        raise ConfigError(
            f"cluster.region: the local cloud is {control.REGION}, not {region}",
            "",
            f"omit --region, or --region {control.REGION}; without --local it is on AWS",
        )


def check_memory(ranks: int, *, nodes: int) -> None:
    """Raise UsageError where this machine has no memory for so many ranks, on all nodes together."""
    room = cgroups.spare_bytes()
    fits = room // RANK_BYTES
    fits -= fits % nodes if fits > nodes else 0
    if ranks > fits:
        raise UsageError(
            f"{ranks} ranks do not fit into the memory of this machine",
            f"a rank takes about {size_text(RANK_BYTES)}, and the local cloud may use {size_text(room)}: "
            f"{cgroups.MEMORY_SHARE:.0%} of what is free",
            f"try: --world-size {max(fits, 1)}, or fewer --nodes",
        )


@contextlib.contextmanager
def opened(
    awsddp_home: Path,
    on_event: OnEvent,
    *,
    start: bool = True,
    ending: bool = True,
    remembered: str | None = None,
) -> Iterator[Target | None]:
    """Yield the local cloud as a target, started where it is not running (`start`), else None.

    `remembered` is the home that a cluster's record names.

    A daemon that was started only because a command needed it ends with the last command, once no instance
    lives in it; a command that cannot have ended one (not `ending`) need not look. Raises LocalCloudError
    where this machine cannot carry it.
    """
    place = home(awsddp_home, remembered)
    with _presence(place) as alone:
        info = control.find(place)
        if info is None and not start:
            yield None
            return
        if info is None or info.pid is None:
            info = control.start(place, auto=True)
        try:
            if start and info.mode != "records":
                image.ensure(info.mode, on_event=lambda text: on_event(Event(text, "")))
            yield msgspec.convert({**vars(info), "name": "local", "daemon_home": str(place)}, Target)
        finally:
            if ending and info.auto and alone() and not _lives(info):
                control.stop(place, keeps_s3=True)


def start(awsddp_home: Path, *, mode: str | None, share: tuple[Path, ...]) -> "LocalDocument":
    """Start the daemon where it does not run, and return its status. Raises LocalCloudError."""
    place = home(awsddp_home)
    with _presence(place):
        return control.ask(control.start(place, mode=mode, share=share))


def status(awsddp_home: Path) -> "LocalDocument":
    """Return the status of a running daemon; a dead one is revived. Raises NotFoundError."""
    with _running(awsddp_home) as info:
        return control.ask(info)


def runs(awsddp_home: Path) -> bool:
    """Tell whether there is a local cloud, without asking it anything."""
    try:
        return control.find(home(awsddp_home)) is not None
    except LocalCloudError:  # of another version
        return True


def variables(awsddp_home: Path, remembered: str | None = None) -> list[str]:
    """Return the variables, NAME=VALUE, with which any AWS client reaches the local cloud, [] if none runs.

    `remembered` is the home that a cluster's record names.
    """
    try:
        info = control.find(home(awsddp_home, remembered))
    except LocalCloudError:  # of another version
        info = None
    if info is None:
        return []
    keys = [f"AWS_ACCESS_KEY_ID={info.access_key_id}", f"AWS_SECRET_ACCESS_KEY={info.secret_access_key}"]
    return [f"AWS_ENDPOINT_URL={info.endpoint}", *keys]


def fault_add(awsddp_home: Path, operation: str, effect: str, **choices: Any) -> "list[Fault]":
    """Make calls of `operation` go wrong, or the node of that id (faults.py), and return the faults in force.

    `choices` are `for_s`, after which it heals by itself; `notice_s` of a node's "reclaim"; of calls `times`,
    how often, else until it is cleared, `seconds`, and `only`: strikes requests with a parameter of this
    value (a launch has its zone). Raises UsageError, NotFoundError where no local cloud is running.
    """
    with _running(awsddp_home) as info:
        order = {"add": {"operation": operation, "effect": effect, **choices}}
        return [*control.ask(info, order).faults]


def instance_of(awsddp_home: Path, cluster: str, node: int) -> str:
    """Return the id of a cluster's node. Raises NotFoundError where no local cloud is running, UsageError."""
    alive = [one for one in status(awsddp_home).instances if one.state != "terminated"]
    nodes = {one.node: one.instance_id for one in alive if one.cluster == cluster and one.node is not None}
    if node not in nodes:
        known = ", ".join(f"node{number}" for number in sorted(nodes)) or "none"
        raise UsageError(
            f"the cluster {cluster} has no node{node}", f"its nodes are {known}", "awsddp status"
        )
    return nodes[node]


def fault_clear(awsddp_home: Path, number: int | None = None) -> "list[Fault]":
    """Take one fault away, or all; return the rest. Raises UsageError, NotFoundError as `fault_add`."""
    with _running(awsddp_home) as info:
        return [*control.ask(info, {"clear": number}).faults]


def stop(awsddp_home: Path) -> bool:
    """End the daemon and all it made; False where there was none. Raises LocalCloudError."""
    ended = control.stop(home(awsddp_home))
    for path in awsddp_home.glob("clusters/*/hosts"):
        folder = Folder(awsddp_home, path.parent.name)
        record = folder.read(newer=True)
        if record is not None and record.target.name == "local":
            folder.publish(lambda *_: "")
    return ended


@contextlib.contextmanager
def _running(awsddp_home: Path) -> Iterator[control.LocalInfo]:
    """Yield the local cloud that there is, alive. Raises NotFoundError."""
    place = home(awsddp_home)
    with _presence(place):
        if control.find(place) is None:
            raise NotFoundError("no local cloud is running", f"{place} has none", "awsddp local start")
        yield control.start(place, auto=True)


def _lives(info: control.LocalInfo) -> bool:
    return any(instance.state != "terminated" for instance in control.ask(info).instances)


@contextlib.contextmanager
def _presence(place: Path) -> Iterator[Any]:
    """Say that a client is there, as a shared lock; what is yielded tells whether it is the last one."""
    make_folder(place)
    with open_to_append(place / "local.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield partial(take, lock)
