"""The interface through which the rest of awsddp starts, queries, stops and connects to the local cloud."""

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
from awsddp.state import ClusterFolder, make_folder, open_to_append, try_lock
from awsddp.util.formatting import size_text

if TYPE_CHECKING:
    from awsddp.model.documents import Fault, LocalDocument

RANK_BYTES = 400_000_000
"""The memory that a rank uses when it trains a small model with torch."""


def resolve_home(awsddp_home: Path, recorded_home: str | None = None) -> Path:
    """Return the local cloud's AWSDDP_HOME: $AWSDDP_LOCAL, or `awsddp_home` if this variable is not set.

    `recorded_home` is the AWSDDP_HOME that a cluster's record names. It takes precedence if it contains a
    local cloud.
    """
    if recorded_home is not None and control.find_cloud(Path(recorded_home)) is not None:
        return Path(recorded_home)
    return Path(os.environ.get("AWSDDP_LOCAL") or awsddp_home).absolute()


def check_region(region: str | None) -> None:
    """Raise ConfigError if `region` is not the local cloud's region."""
    if region != control.REGION:
        raise ConfigError(
            f"cluster.region: the local cloud is in {control.REGION}, not in {region}",
            "",
            f"omit --region, or use --region {control.REGION}; to use AWS, omit --local",
        )


def check_memory(ranks: int, *, nodes: int) -> None:
    """Raise UsageError if this machine has too little memory for `ranks` ranks on all nodes together."""
    usable_bytes = cgroups.spare_bytes()
    max_ranks = usable_bytes // RANK_BYTES
    max_ranks -= max_ranks % nodes if max_ranks > nodes else 0
    if ranks > max_ranks:
        raise UsageError(
            f"{ranks} ranks do not fit into the memory of this machine",
            f"a rank takes about {size_text(RANK_BYTES)}, and the local cloud may use "
            f"{size_text(usable_bytes)}: {cgroups.MEMORY_SHARE:.0%} of the free memory",
            f"try: --world-size {max(max_ranks, 1)}, or fewer --nodes",
        )


@contextlib.contextmanager
def open_cloud(
    awsddp_home: Path,
    on_event: OnEvent,
    *,
    start: bool = True,
    may_stop: bool = True,
    recorded_home: str | None = None,
) -> Iterator[Target | None]:
    """Yield the local cloud as a target. If the local cloud is not running, start it if `start` is True, and
    otherwise yield None.

    `recorded_home` is the AWSDDP_HOME that a cluster's record names.

    If a command started the daemon automatically, the last command to end stops the daemon, unless the daemon
    has instances. Commands that do not terminate any instances set `may_stop` to False, so that they never
    stop the daemon. Raises LocalCloudError if this machine cannot run the local cloud.
    """
    cloud_home = resolve_home(awsddp_home, recorded_home)
    with _hold_presence_lock(cloud_home) as is_last_client:
        info = control.find_cloud(cloud_home)
        if info is None and not start:
            yield None
            return
        if info is None or info.pid is None:
            info = control.start(cloud_home, auto=True)
        try:
            if start and info.mode != "records":
                image.ensure_torch(info.mode, on_event=lambda text: on_event(Event(text, "")))
            yield msgspec.convert({**vars(info), "name": "local", "daemon_home": str(cloud_home)}, Target)
        finally:
            if may_stop and info.auto and is_last_client() and not _has_instances(info):
                control.stop(cloud_home, keep_s3=True)


def start(awsddp_home: Path, *, mode: str | None, share: tuple[Path, ...]) -> "LocalDocument":
    """Start the daemon if it is not running, and return its status. Raises LocalCloudError."""
    cloud_home = resolve_home(awsddp_home)
    with _hold_presence_lock(cloud_home):
        return control.send_command(control.start(cloud_home, mode=mode, share=share))


def status(awsddp_home: Path) -> "LocalDocument":
    """Return the local cloud's status. Restart the daemon if the daemon died. Raises NotFoundError."""
    with _connect(awsddp_home) as info:
        return control.send_command(info)


def is_running(awsddp_home: Path) -> bool:
    """Return True if there is a local cloud, without sending a request to it."""
    try:
        return control.find_cloud(resolve_home(awsddp_home)) is not None
    except LocalCloudError:  # another version made it
        return True


def list_aws_variables(awsddp_home: Path, recorded_home: str | None = None) -> list[str]:
    """Return the variables (NAME=VALUE) that make any AWS client use the local cloud; [] if no local cloud is
    running.

    `recorded_home` is the AWSDDP_HOME that a cluster's record names.
    """
    try:
        info = control.find_cloud(resolve_home(awsddp_home, recorded_home))
    except LocalCloudError:  # another version made it
        info = None
    if info is None:
        return []
    keys = [f"AWS_ACCESS_KEY_ID={info.access_key_id}", f"AWS_SECRET_ACCESS_KEY={info.secret_access_key}"]
    return [f"AWS_ENDPOINT_URL={info.endpoint}", *keys]


def add_fault(awsddp_home: Path, operation: str, effect: str, **choices: Any) -> "list[Fault]":
    """Add a fault (faults.py) and return all active faults. `operation` is the API operation whose calls have
    the fault, or the id of the instance that has it.

    `choices` can have `for_s`, the seconds after which the fault ends, and `notice_s` for "reclaim". A fault
    in API calls can also have `times`, the number of calls to affect (default: all calls until the fault is
    cleared), `seconds`, and `only`, a parameter value that a request must have (a launch's zone counts as a
    parameter value). Raises UsageError, or NotFoundError if no local cloud is running.
    """
    with _connect(awsddp_home) as info:
        command = {"add": {"operation": operation, "effect": effect, **choices}}
        return [*control.send_command(info, command).faults]


def find_instance_id(awsddp_home: Path, cluster: str, node: int) -> str:
    """Return a node's instance id. Raises UsageError, or NotFoundError if no local cloud is running."""
    instances = [row for row in status(awsddp_home).instances if row.state != "terminated"]
    ids = {row.node: row.instance_id for row in instances if row.cluster == cluster and row.node is not None}
    if node not in ids:
        node_names = ", ".join(f"node{number}" for number in sorted(ids)) or "none"
        raise UsageError(
            f"the cluster {cluster} has no node{node}", f"its nodes are {node_names}", "awsddp status"
        )
    return ids[node]


def clear_faults(awsddp_home: Path, number: int | None = None) -> "list[Fault]":
    """Remove one fault, or all faults; return the faults that remain. Raises the same errors as
    `add_fault`."""
    with _connect(awsddp_home) as info:
        return [*control.send_command(info, {"clear": number}).faults]


def stop(awsddp_home: Path) -> bool:
    """Stop and remove the local cloud; return False if there was none. Raises LocalCloudError."""
    existed = control.stop(resolve_home(awsddp_home))
    for path in awsddp_home.glob("clusters/*/hosts"):
        folder = ClusterFolder(awsddp_home, path.parent.name)
        record = folder.read(ignore_newer=True)
        if record is not None and record.target.name == "local":
            folder.write_ssh_config(lambda *_: "")
    return existed


@contextlib.contextmanager
def _connect(awsddp_home: Path) -> Iterator[control.LocalInfo]:
    """Yield the local cloud. Restart the daemon if the daemon died. Raises NotFoundError."""
    cloud_home = resolve_home(awsddp_home)
    with _hold_presence_lock(cloud_home):
        if control.find_cloud(cloud_home) is None:
            raise NotFoundError("no local cloud is running", f"{cloud_home} has none", "awsddp local start")
        yield control.start(cloud_home, auto=True)


def _has_instances(info: control.LocalInfo) -> bool:
    return any(instance.state != "terminated" for instance in control.send_command(info).instances)


@contextlib.contextmanager
def _hold_presence_lock(cloud_home: Path) -> Iterator[Any]:
    """Hold the lock that all clients share. Yield a function that returns True if no other client holds the
    lock."""
    make_folder(cloud_home)
    with open_to_append(cloud_home / "local.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield partial(try_lock, lock)
