"""Run rsync over the system's ssh without a shell, report its progress, and explain its exit codes."""

import functools
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from awsddp.errors import ConfigError
from awsddp.model.events import Event, OnEvent
from awsddp.nodes.node_failures import Layer, NodeFailure, find_program, tail
from awsddp.util.formatting import node_name
from awsddp.util.parallel import run_in_thread

SPARSE = ("--sparse", "--compress")
"""Options for files with holes. The holes are transferred as compressed zeros and are written as holes."""
_PROGRESS = re.compile(r"\s*(\d+)\s+\d+%")
_STEPS = 200  # the maximum number of progress reports in a transfer
_PARTLY = 23
_GONE_AT_SENDER = 24
_NETWORK = {10, 12, 30, 35, 255}


@functools.cache
def find_rsync() -> str:
    """Return rsync's path on this machine. Raises ConfigError.

    Versions before 3.2.5 are refused, because they accept unrequested files from a malicious sender:
    https://download.samba.org/pub/rsync/NEWS#3.2.5.
    """
    install = "sudo apt-get install rsync   # macOS: brew install rsync"
    path = find_program("rsync", "files are transferred by rsync", f"install it: {install}")
    find_program("ssh", "files are transferred over ssh", "install it: sudo apt-get install openssh-client")
    output = subprocess.run(
        [path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout
    version = re.match(r"rsync\s+version v?(\d+)\.(\d+)\.(\d+)", output)
    if version is None or tuple(map(int, version.groups())) < (3, 2, 5):
        first = output.splitlines()[0] if output else "its version is unknown"
        later = f"{install}\nconda install -c conda-forge rsync   # if the system has no later version"
        raise ConfigError(f"{path} is not rsync 3.2.5 or later", first, later)
    return path


@dataclass(frozen=True)
class Progress:
    """Reports the progress of a transfer with `node`. The transfer has `size` bytes."""

    node: int
    text: str
    size: int
    on_event: OnEvent

    def report(self, done: int) -> None:
        """Report that `done` bytes have been transferred."""
        fraction = min(1.0, done / max(1, self.size))
        self.on_event(Event(self.text, who=node_name(self.node), fraction=fraction, size=self.size))


def transfer(
    args: Sequence[str],
    paths: Iterable[str],
    *,
    ssh_config: Path,
    stop: threading.Event,
    progress: Progress,
    allow_partial: bool = False,
) -> None:
    """Run rsync with `args` (options, source, destination) for `paths`, which are passed on stdin.

    Raises NodeFailure with rsync's last lines. Files that vanish at the sender are not an error. If
    `allow_partial` is set, files that cannot be sent are also not an error. The transfer ends early, without
    an error, once `stop` is set.
    """
    shell = f"ssh -F {_quote(os.fspath(ssh_config))}"
    argv = [find_rsync(), "--from0", "--files-from=-", "--ignore-missing-args", "--info=progress2"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RSYNC_")}
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as complaints:
        names.write(b"".join(os.fsencode(path) + b"\0" for path in paths))
        names.seek(0)
        with subprocess.Popen(
            [*argv, "--no-human-readable", "-e", shell, *args],
            stdin=names,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env={**environ, "LC_ALL": "C"},
            errors="replace",  # in text mode a carriage return ends a line
        ) as process:
            assert process.stdout is not None
            run_in_thread(_terminate_on_stop, process, stop)
            try:
                done = 0
                for line in process.stdout:
                    match = _PROGRESS.match(line)
                    if match and int(match[1]) - done > progress.size / _STEPS:
                        progress.report(done := int(match[1]))
            except BaseException:
                process.terminate()  # rsync ends its children, and the `with` block waits for rsync
                raise
        code = process.returncode
        if stop.is_set() or code in (0, _GONE_AT_SENDER) or (allow_partial and code == _PARTLY):
            return
        complaints.seek(0)
        raise _failure(progress.node, code, complaints.read().decode(errors="replace"))


def _terminate_on_stop(process: subprocess.Popen[str], stop: threading.Event) -> None:
    stop.wait()
    process.terminate()


def _failure(node: int, code: int, stderr: str) -> NodeFailure:
    layer: Layer = "files"
    if "rsync: command not found" in stderr or "rsync: not found" in stderr or code == 127:
        return NodeFailure(node, layer, "rsync is not installed", tail(stderr))
    if "No space left on device" in stderr:
        message = "a disk is full"
    elif code in _NETWORK:
        message, layer = "the transfer was interrupted", "lost"
    elif code == _PARTLY:
        message = "some files could not be transferred"
    else:
        message = "the transfer failed"
    return NodeFailure(node, layer, f"{message} (rsync exit {code})", tail(stderr))


def _quote(word: str) -> str:
    """Return a word quoted for rsync's -e option: in single quotes, with inner single quotes doubled."""
    return "'" + word.replace("'", "''") + "'"
