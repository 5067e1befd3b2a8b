"""What a local cloud leaves on a machine while it runs."""

import os
import subprocess
from pathlib import Path


def traces(home: Path) -> list[str]:
    """Return the namespaces, interfaces, mounts and processes that belong to the daemon of `home`."""
    from awsddp.local.machine import CloudPaths

    mark = CloudPaths(home).tag
    return sorted(
        [f"namespace {line}" for line in _lines("ip", "netns", "list") if mark in line]
        + [f"interface {line}" for line in _lines("ip", "-o", "link") if mark in line]
        + [f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if str(home) in line]
        + [f"process {pid}" for pid in _processes(home)]
    )


def _lines(*words: str) -> list[str]:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def _processes(home: Path) -> list[str]:
    found = []
    for pid in Path("/proc").glob("[0-9]*"):
        try:
            known = (pid / "environ").read_bytes() + (pid / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(home) in known and int(pid.name) != os.getpid():
            found.append(pid.name)
    return found
