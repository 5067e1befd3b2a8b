"""Faults of a node, asked for by its instance id.

    cut        no packet reaches it or leaves it
    one-way    what it sends is dropped, what is sent to it arrives
    frozen     nothing runs in it, sshd included
    full-disk  its file system has no space left
    reboot     once, in order, as from inside
    poweroff   once, in order, as from inside

They are kept beside the faults of calls (faults.py); the worker of the hosts (lifecycle.py) brings them about
and heals them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from awsddp.errors import UsageError
from awsddp.local import cgroups
from awsddp.local.network import METADATA_ADDRESS

LASTING = ("cut", "one-way", "frozen", "full-disk")
ONCE = ("reboot", "poweroff")
FILLER = "filler"
HELP = "awsddp local fault add --help"


def names_node(operation: str) -> bool:
    """Whether a fault is of an instance, not of calls."""
    return operation.startswith("i-")


def check(asked: Mapping[str, Any], *, states: Mapping[str, str], mode: str) -> None:
    """Looks at a fault of a node before it is taken up.

    :param asked: the fields of the fault.
    :param states: the state of each instance by its id.
    :raises UsageError: no such instance or effect, choices that are for calls, a mode that cannot do it.
    """
    instance_id, effect = asked["operation"], asked["effect"]
    if effect not in LASTING + ONCE:
        raise UsageError(
            f"invalid fault of a node: {effect}", f"it is one of {', '.join(LASTING + ONCE)}", HELP
        )
    alive = [one for one, state in states.items() if state not in ("shutting-down", "terminated")]
    if instance_id not in alive:
        known = ", ".join(alive) or "none: run awsddp up --local"
        raise UsageError(f"instance not found: {instance_id}", f"the instances are {known}", HELP)
    if given := sorted({"times", "seconds", "only"} & set(asked)):
        raise UsageError(f"--{given[0]} is for faults of calls", "a fault of a node takes --for", HELP)
    if effect in ONCE and "for_s" in asked:
        raise UsageError(f"{effect} happens once", "--for is for what lasts", HELP)
    if effect in ONCE and states[instance_id] != "running":
        raise UsageError(f"{instance_id} is {states[instance_id]}", f"{effect} is for a node that runs", HELP)
    if mode != "nspawn":
        raise UsageError(
            f"{effect} needs nodes that are machines of their own",
            f"this local cloud runs in {mode} mode",
            "as root: awsddp local stop, then awsddp local start",
        )
    if effect == "frozen" and not cgroups.can_freeze():
        raise UsageError("this machine cannot freeze a node", "it has no cgroup v2", HELP)


def rules(effects: frozenset[str]) -> str:
    """What nftables does in the node's namespace, as text to load; it replaces what was in force.

    What passes is dropped, not refused: connections live on once it heals.
    """
    chains = ""
    for hook, side, peer in (("input", "iif", "saddr"), ("output", "oif", "daddr")):
        if "cut" in effects or (hook == "output" and "one-way" in effects):
            chains += (
                f" chain {hook} {{\n  type filter hook {hook} priority -10;\n"
                f"  ip {peer} {METADATA_ADDRESS} accept\n  {side} != lo drop\n }}\n"
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


def empty(disk: Path) -> None:
    """Gives back what `fill` took."""
    with suppress(FileNotFoundError):
        (disk / FILLER).unlink()
