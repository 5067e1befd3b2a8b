"""The namespaces, interfaces, mounts and processes of a running local cloud."""

import os
import subprocess
from pathlib import Path


def find_traces(home: Path) -> list[str]:
    """Return the namespaces, interfaces, mounts and processes that belong to the daemon of `home`."""
    from awsddp.local.machine import CloudPaths

    tag = CloudPaths(home).tag
    return sorted(
        [f"namespace {line}" for line in _lines("ip", "netns", "list") if tag in line]
        + [f"interface {line}" for line in _lines("ip", "-o", "link") if tag in line]
        + [f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if str(home) in line]
        + [f"process {pid}" for pid in _processes(home)]
    )


def _lines(*words: str) -> list[str]:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def _processes(home: Path) -> list[str]:
    pids = []
    for pid in Path("/proc").glob("[0-9]*"):
        try:
            text = (pid / "environ").read_bytes() + (pid / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(home) in text and int(pid.name) != os.getpid():
            pids.append(pid.name)
    return pids
