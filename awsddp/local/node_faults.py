"""Faults of a node, asked for by its instance id.

    cut           no packet reaches it or leaves it
    one-way       what it sends is dropped, what is sent to it arrives
    slow-network  more than 1 MB/s in or out is dropped
    slow-cpu      its processes together get a small part of one CPU
    frozen        nothing runs in it, sshd included
    full-disk     its file system has no space left
    oom           its memory is limited to little more than is used: what asks for more is killed
    clock         what a login starts in it sees a clock that is ahead
    hostkey       its sshd shows another host key
    reboot        once, in order, as from inside
    poweroff      once, in order, as from inside
    reclaim       a spot instance is taken back: its metadata say so, and after the notice it ends

They are kept beside the faults of calls (faults.py); the worker of the hosts (lifecycle.py) brings them about
and heals them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from awsddp.errors import UsageError
from awsddp.local import cgroups
from awsddp.local.network import METADATA_ADDRESS

LASTING = (
    *("cut", "one-way", "slow-network", "slow-cpu", "frozen"),
    *("full-disk", "oom", "clock", "hostkey"),
)
ONCE = ("reboot", "poweroff", "reclaim")
EFFECTS = LASTING + ONCE
OPTIONS: dict[str, set[str]] = {"reboot": set(), "poweroff": set(), "reclaim": {"notice_s"}}
"""The options of what happens once; what lasts takes `--for`."""
NOTICE_S = 120.0
"""How long before its end EC2 tells a spot instance that it is taken back."""
FILLER = "filler"
SLOW_NETWORK = "1 mbytes/second burst 64 kbytes"
"""What nftables lets pass of each direction: what the rate allows in a second may come at once."""
CLOCK = "FAKETIME=+120s\nDONT_FAKE_MONOTONIC=1\nNO_FAKE_STAT=1\nLD_PRELOAD={library}\n"
"""The variables of a login that sees the wrong time: https://manpages.debian.org/faketime"""
HOST_KEY = "etc/ssh/ssh_host_ed25519_key"


def names_node(operation: str) -> bool:
    """Whether a fault is of an instance, not of calls."""
    return operation.startswith("i-")


def check(asked: Mapping[str, Any], instances: Mapping[str, Any], *, mode: str) -> None:
    """Looks at a fault of a node before it is taken up.

    :param asked: the fields of the fault.
    :param instances: those of all regions by their ids, terminated ones too.
    :raises UsageError: no such instance or effect, choices that are for calls, a mode that cannot do it.
    """
    instance_id, effect = asked["operation"], asked["effect"]
    if effect not in EFFECTS:
        raise invalid(f"invalid fault of a node: {effect}", f"it is one of {', '.join(EFFECTS)}")
    alive = [id for id, one in instances.items() if one.state not in ("shutting-down", "terminated")]
    if instance_id not in alive:
        known = ", ".join(alive) or "none: run awsddp up --local"
        raise invalid(f"instance not found: {instance_id}", f"the instances are {known}")
    check_options(asked, OPTIONS.get(effect, {"for_s"}))
    if effect in ONCE and instances[instance_id].state != "running":
        raise invalid(f"{instance_id} is {instances[instance_id].state}", f"{effect} is for a node that runs")
    if effect == "reclaim":
        if instances[instance_id].lifecycle != "spot":
            raise invalid(f"{instance_id} is not a spot instance", "create one: awsddp up --local --spot")
    elif mode != "nspawn":
        why = f"this local cloud runs in {mode} mode; as root: awsddp local stop, then awsddp local start"
        raise invalid(f"{effect} needs nodes that are machines of their own", why)
    elif effect == "frozen" and not cgroups.can_freeze():
        raise invalid("this machine cannot freeze a node", "it has no cgroup v2")
    elif effect == "clock" and faketime() is None:
        why = "Debian's package faketime is missing: apt-get install faketime"
        raise invalid("this machine cannot shift a node's clock", why)


def check_options(asked: Mapping[str, Any], possible: Set[str]) -> None:
    """Raise UsageError where a fault has an option that is not for it."""
    if more := sorted(set(asked) - possible - {"operation", "effect"}):
        option = more[0].removesuffix("_s")
        known = " and ".join(f"--{name.removesuffix('_s')}" for name in sorted(possible))
        raise invalid(f"--{option} is not for {asked['effect']}", f"it takes {known or 'no options'}")


def invalid(message: str, why: str = "") -> UsageError:
    """Return the error of a fault that cannot be."""
    return UsageError(message, why, "awsddp local fault add --help")


def rules(effects: frozenset[str]) -> str:
    """What nftables does in the node's namespace, as text to load; it replaces what was in force.

    What passes is dropped, not refused: connections live on once it heals.
    """
    chains = ""
    for hook, side, peer in (("input", "iif", "saddr"), ("output", "oif", "daddr")):
        verdicts = []
        if "cut" in effects or (hook == "output" and "one-way" in effects):
            verdicts.append("drop")
        if "slow-network" in effects:
            verdicts.append(f"limit rate over {SLOW_NETWORK} drop")
        if verdicts:
            dropped = "".join(f"  {side} != lo {verdict}\n" for verdict in verdicts)
            chains += (
                f" chain {hook} {{\n  type filter hook {hook} priority -10;\n"
                f"  ip {peer} {METADATA_ADDRESS} accept\n{dropped} }}\n"
            )
    return f"table inet faults\ndelete table inet faults\ntable inet faults {{\n{chains}}}\n"


def fill(disk: Path) -> None:
    """Takes all that is free of a file system, without writing it."""
    with (disk / FILLER).open("ab") as file:
        block = os.statvfs(disk).f_frsize
        blocks = os.statvfs(disk).f_bavail
        while blocks:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, blocks * block)
            except OSError:  # its own tables take room too
                blocks //= 2


def faketime() -> Path | None:
    """The library that changes what processes see of the clock, None where it is not installed."""
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


def set_clock(root: Path, *, ahead: bool) -> None:
    """Lets what a login starts in a node see a clock that is ahead, or the true one.

    :param root: the node's files.
    """
    path, variables = root / "etc/environment", CLOCK.format(library=faketime())
    text = path.read_text().replace(variables, "")
    path.write_text(text + variables if ahead else text)


def set_host_key(root: Path, *, other: bool) -> bool:
    """Put another host key in the place of a node's own, or its own back; true if sshd has to read it."""
    shown, own = root / HOST_KEY, root / f"{HOST_KEY}.own"
    if other == own.exists():
        return False
    if other:
        made = root / f"{HOST_KEY}.other"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made)], check=True)
        shown.rename(own)
        made.rename(shown)
    else:
        own.rename(shown)
    return True
