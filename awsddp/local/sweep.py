"""Removes all that a local cloud had, by name alone: it needs neither its daemon nor its state."""

from __future__ import annotations

import shutil
from contextlib import suppress

from awsddp.errors import LocalCloudError
from awsddp.local import cgroups, ending, network, nspawn
from awsddp.local.place import Place


def remains(place: Place) -> bool:
    """Tell whether a process of its hosts lives, or a namespace is there."""
    return bool(cgroups.processes(place) or ending.marked(f"{place.tag}-") or network.namespaces(place))


def sweep(place: Place) -> None:
    """Ends every process of its hosts and removes namespaces, interfaces, cgroups and files.

    :raises LocalCloudError: something is still there.
    """
    mark = f"{place.tag}-"
    if not (cgroups.end(place) and ending.end(mark)):
        raise LocalCloudError(
            "processes of the local cloud do not end",
            why=f"pids {sorted({*cgroups.processes(place), *ending.marked(mark)})[:10]}",
            next="awsddp local stop",
        )
    network.close_network(place)
    for folder in (nspawn.RUNTIME / "propagate").glob(f"{place.machine('')}*"):
        with suppress(OSError):
            folder.rmdir()
    nspawn.forget_locks()
    if place.folder.exists():
        shutil.rmtree(place.folder)
